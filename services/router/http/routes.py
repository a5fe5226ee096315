"""The OpenAI routes. One method each; the app mounts them."""

import time
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from services.common.errors import ModelNotFound
from services.common.ids import new_req_id
from services.common.telemetry import req_id_context
from services.router.choice import TextEvent
from services.router.generation import Generation
from services.router.http.answers import Answer, ChatAnswer, CompletionAnswer, FinishedChoice
from services.router.http.body import read_bytes
from services.router.http.chat import ChatBody
from services.router.http.disconnect import run_until_disconnect
from services.router.http.event_stream import EventSink, EventStream, StreamPace
from services.router.http.parsing import BodyParser
from services.router.http.schemas import CompletionBody, OpenAiBody
from services.router.http.tool_answers import ToolAnswer
from services.router.request import TextRequest

Body = TypeVar("Body", bound=OpenAiBody)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_body_bytes: int
    pace: StreamPace


class OpenAiRoutes:
    def __init__(self, generation: Generation, parser: BodyParser, limits: HttpLimits) -> None:
        self._generation = generation
        self._parser = parser
        self._limits = limits

    @property
    def model_name(self) -> str:
        return self._generation.model.name

    async def completions(self, request: Request) -> Response:
        body, wanted = await self._read(request, CompletionBody)
        answer = CompletionAnswer(*self._head(body))
        return await self._answer(request, wanted, body, answer)

    async def chat_completions(self, request: Request) -> Response:
        body, wanted = await self._read(request, ChatBody)
        head, tools = self._head(body), wanted.tools
        if tools is None:
            return await self._answer(request, wanted, body, ChatAnswer(*head))
        syntax = self._generation.model.call_syntax
        answer = ToolAnswer(*head, lambda: tools.parser(syntax))
        return await self._answer(request, wanted, body, answer)

    async def _read(self, request: Request, kind: type[Body]) -> tuple[Body, TextRequest]:
        raw = await read_bytes(request, self._limits.max_body_bytes)
        return await self._parser.parse(kind, raw)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        if name != self._generation.model.name:
            raise ModelNotFound(f"model {name!r} is not served here", param="model")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        model = self._generation.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "infinite-llm",
        }

    def _head(self, body: OpenAiBody) -> tuple[int, int, str, bool, bool]:
        req_id = req_id_context.get() or new_req_id()
        name, has_logprobs = self._generation.model.name, body.num_logprobs is not None
        return req_id, int(time.time()), name, body.include_usage, has_logprobs

    async def _answer(
        self, http: Request, request: TextRequest, body: OpenAiBody, answer: Answer
    ) -> Response:
        if body.stream:
            return self._stream(request, answer, body.include_usage)
        return await run_until_disconnect(http.receive, self._whole(request, answer))

    async def _whole(self, request: TextRequest, answer: Answer) -> Response:
        choices = [FinishedChoice() for _ in range(len(request.prompts) * request.n)]

        async def emit(event: TextEvent) -> None:
            choices[event.index].add(event)

        usage = await self._generation.run(request, emit)
        return JSONResponse(answer.whole(choices, usage))

    def _stream(self, request: TextRequest, answer: Answer, include_usage: bool) -> Response:
        async def produce(sink: EventSink) -> None:
            begun: set[int] = set()

            async def emit(event: TextEvent) -> None:
                for chunk in answer.chunks(event, event.index not in begun):
                    await sink.event(chunk)
                begun.add(event.index)

            usage = await self._generation.run(request, emit)
            if include_usage:
                await sink.event(answer.usage_chunk(usage))
            await sink.done()

        return EventStream(produce, self._limits.pace)
