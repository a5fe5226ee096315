"""From a text request to a stream of text: the one path behind HTTP and gRPC.

Check -> tokenise -> dispatch -> assemble. Events are pushed to the caller's `emit`, whose slowness
holds back the worker's stream; cancelling `run` cancels everything below.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from services.common.errors import ContextLengthExceeded, ModelNotFound, Unavailable
from services.router.admission import Admission
from services.router.capacity import max_request_tokens
from services.router.discovery import Discovery
from services.router.dispatch import Dispatcher, FinishReason, TokenJob
from services.router.metrics import RouterMetrics
from services.router.request import TextRequest
from services.router.served_model import ServedModel
from services.router.text.assembler import TextAssembler


@dataclass(frozen=True, slots=True)
class TextEvent:
    index: int
    """Which prompt of the request."""
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


Emit = Callable[[TextEvent], Awaitable[None]]


class Generation:
    def __init__(
        self,
        model: ServedModel,
        discovery: Discovery,
        dispatcher: Dispatcher,
        admission: Admission,
        metrics: RouterMetrics,
    ) -> None:
        self.model = model
        self._discovery = discovery
        self._dispatcher = dispatcher
        self._admission = admission
        self._metrics = metrics

    async def run(self, request: TextRequest, emit: Emit) -> Usage:
        """Runs every prompt to its end. Calls of `emit` never overlap."""
        if request.model != self.model.name:
            raise ModelNotFound(f"model {request.model!r} is not served here", param="model")
        with self._admission.enter(len(request.prompts)):
            jobs = await self._jobs(request)
            num_prompt_tokens = sum(len(job.prompt_token_ids) for job in jobs)
            self._metrics.prompt_tokens.inc(num_prompt_tokens)
            num_tokens = await self._run_all(request, jobs, emit)
            return Usage(num_prompt_tokens, num_tokens)

    async def _jobs(self, request: TextRequest) -> list[TokenJob]:
        instances = self._discovery.serving
        if not instances:
            raise Unavailable("no instance is ready")
        capacity = max_request_tokens(instances)
        jobs = []
        for prompt in request.prompts:
            token_ids = await self.model.tokens_of(prompt, capacity)
            max_tokens = _max_tokens(request, len(token_ids), capacity)
            jobs.append(TokenJob(token_ids, max_tokens, request.sampling))
        return jobs

    async def _run_all(self, request: TextRequest, jobs: Sequence[TokenJob], emit: Emit) -> int:
        lock = asyncio.Lock()

        async def emit_alone(event: TextEvent) -> None:
            async with lock:
                await emit(event)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._run_one(index, job, request.stop, emit_alone))
                    for index, job in enumerate(jobs)
                ]
        except BaseExceptionGroup as failures:
            # The first one cancelled the others; the client gets one error.
            raise failures.exceptions[0] from None
        return sum(task.result() for task in tasks)

    async def _run_one(self, index: int, job: TokenJob, stop: Sequence[str], emit: Emit) -> int:
        tokenizer = self.model.tokenizer
        assembler = TextAssembler(tokenizer.decode, stop)
        timer = _Timer(self._metrics)

        async def on_tokens(token_ids: Sequence[int]) -> bool:
            timer.on_tokens(len(token_ids))
            text = await tokenizer.in_decode_thread(partial(assembler.push, token_ids))
            if text:
                await emit(TextEvent(index, text, None))
            return assembler.stopped

        finish_reason = await self._dispatcher.generate(job, on_tokens)
        timer.on_end()
        text = await tokenizer.in_decode_thread(assembler.flush)
        await emit(TextEvent(index, text, "stop" if assembler.stopped else finish_reason))
        return assembler.num_tokens


def _max_tokens(request: TextRequest, num_prompt_tokens: int, capacity: int) -> int:
    room = capacity - num_prompt_tokens
    if request.max_tokens is None:
        max_tokens = max(1, min(request.default_max_tokens, room))
    else:
        max_tokens = request.max_tokens
    if max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and {max_tokens} are to be generated, but "
            f"one request can use {capacity} tokens here",
            param=request.prompt_param,
        )
    return max_tokens


class _Timer:
    """Measures one sequence from its admission on."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._start_s = time.monotonic()
        self._first_s: float | None = None
        self._num_tokens = 0

    def on_tokens(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        self._metrics.generation_tokens.inc(num_tokens)
        if self._first_s is None:
            self._first_s = time.monotonic()
            self._metrics.time_to_first_token.observe(self._first_s - self._start_s)

    def on_end(self) -> None:
        now_s = time.monotonic()
        self._metrics.end_to_end.observe(now_s - self._start_s)
        if self._first_s is not None and self._num_tokens > 1:
            per_token_s = (now_s - self._first_s) / (self._num_tokens - 1)
            self._metrics.time_per_output_token.observe(per_token_s)
