"""`/tokenize` and `/detokenize`: the model's own tokens, as vLLM asks and tells of them."""

import asyncio
from dataclasses import dataclass
from typing import Any, Self

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict

from services.common.errors import InvalidRequest, ModelNotFound
from services.router.generation import Generation
from services.router.http.body import read_bytes
from services.router.http.chat import Message, chat_prompt
from services.router.http.parsing import BodyParser
from services.router.http.request_body import RequestBody
from services.router.http.strict import Items
from services.router.request import ChatPrompt

#: In one answer; prompts may be longer.
MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    model: str | None
    prompt: str | ChatPrompt
    add_special_tokens: bool
    with_texts: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    model: str | None
    token_ids: tuple[int, ...]


class TokenizeBody(RequestBody):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    #: Absent: with a prompt, since a chat template has them already.
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check_fields(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("one of prompt and messages is required", param="prompt")

    def to_request(self) -> TokenizeRequest:
        prompt = chat_prompt(self.messages or ()) if self.prompt is None else self.prompt
        special = self.add_special_tokens
        special = isinstance(prompt, str) if special is None else special
        return TokenizeRequest(self.model, prompt, special, bool(self.return_token_strs))

    def without_prompt(self) -> Self:
        return self.model_copy(update={"prompt": None, "messages": None})


class DetokenizeBody(RequestBody):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: Items[int]

    def check_fields(self) -> None:
        if len(self.tokens) > MAX_TOKENS:
            raise InvalidRequest(f"tokens must be at most {MAX_TOKENS}", param="tokens")

    def to_request(self) -> DetokenizeRequest:
        return DetokenizeRequest(self.model, tuple(self.tokens))

    def without_prompt(self) -> Self:
        return self.model_copy(update={"tokens": []})


class TokenRoutes:
    def __init__(self, generation: Generation, parser: BodyParser, max_body_bytes: int) -> None:
        self._generation = generation
        self._parser = parser
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, http: Request) -> Response:
        raw = await read_bytes(http, self._max_body_bytes)
        _, request = await self._parser.parse(TokenizeBody, raw)
        self._check_model(request.model)
        model = self._generation.model
        token_ids = await model.tokenize(request.prompt, request.add_special_tokens, MAX_TOKENS)
        body: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._generation.max_request_tokens,
            "tokens": token_ids,
        }
        if request.with_texts:
            body["token_strs"] = await model.tokenizer.in_encode_thread(
                lambda: [model.tokenizer.piece(token_id) for token_id in token_ids]
            )
        return await asyncio.to_thread(JSONResponse, body)

    async def detokenize(self, http: Request) -> Response:
        raw = await read_bytes(http, self._max_body_bytes)
        _, request = await self._parser.parse(DetokenizeBody, raw)
        self._check_model(request.model)
        model = self._generation.model
        model.check_token_ids(request.token_ids, "tokens")
        text = await model.tokenizer.decode_all(request.token_ids)
        return await asyncio.to_thread(JSONResponse, {"prompt": text})

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._generation.model.name):
            raise ModelNotFound(f"model {name!r} is not served here", param="model")
