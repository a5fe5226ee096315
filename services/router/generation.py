"""From a text request to a stream of text: the one path behind HTTP and gRPC.

Check -> tokenise -> dispatch -> assemble. Events are pushed to the caller's `emit`, whose slowness
holds back the worker's stream; cancelling `run` cancels everything below.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.common.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from services.router.access.account import charge
from services.router.admission import Admission
from services.router.capacity import max_request_tokens
from services.router.choice import Choice, Emit, PromptShare, TextEvent
from services.router.discovery import Discovery
from services.router.dispatch import Dispatcher
from services.router.metrics import RouterMetrics
from services.router.request import TextRequest
from services.router.served_model import ServedModel
from services.router.token_job import TokenChunk, TokenJob, choice_seed


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were found computed."""


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

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of one request together, when all instances of late are there."""
        return self._discovery.usual_capacity

    async def run(self, request: TextRequest, emit: Emit) -> Usage:
        """Runs every choice to its end. Calls of `emit` never overlap."""
        if request.model != self.model.name:
            raise ModelNotFound(f"model {request.model!r} is not served here", param="model")
        if request.tools is not None:
            grammar = request.tools.grammar(self.model.call_syntax)
            request = replace(request, grammar=grammar)
        with self._admission.enter(len(request.prompts) * request.n):
            jobs = await self._jobs(request, time.time())
            num_prompt_tokens = sum(len(job.prompt_token_ids) for job in jobs)
            self._metrics.prompt_tokens.inc(num_prompt_tokens)
            charge(num_prompt_tokens)
            shares = [PromptShare() for _ in jobs]
            num_tokens = await self._run_all(request, jobs, shares, emit)
            num_cached = sum(share.num_cached_tokens for share in shares)
            return Usage(num_prompt_tokens, num_tokens, num_cached)

    async def _jobs(self, request: TextRequest, arrived_at_s: float) -> list[TokenJob]:
        """One for each prompt."""
        instances = self._discovery.serving
        if not instances:
            raise Unavailable("no instance is ready")
        self.model.check_token_ids(request.sampling.logit_bias, "logit_bias")
        self.model.check_token_ids(request.stop_token_ids, "stop_token_ids")
        await self._check_grammar(request)
        capacity = max_request_tokens(instances)
        jobs = []
        for prompt in request.prompts:
            usual_capacity = max(capacity, self._discovery.usual_capacity)
            token_ids = await self.model.tokens_of(prompt, usual_capacity)
            if capacity < len(token_ids) + max(1, request.max_tokens or 1) <= usual_capacity:
                raise Unavailable("an instance without which the request does not fit is away")
            max_tokens = _max_tokens(request, len(token_ids), capacity)
            job = _job(request, token_ids, max_tokens)
            jobs.append(replace(job, arrived_at_s=arrived_at_s))
        return jobs

    async def _check_grammar(self, request: TextRequest) -> None:
        if request.grammar is None:
            return
        try:
            await self.model.grammars.check(request.grammar)
        except InvalidRequest:
            # Of several functions, name the one at fault.
            for part in request.tools.grammars_of_arguments() if request.tools else ():
                await self.model.grammars.check(part)
            raise

    async def _run_all(
        self,
        request: TextRequest,
        jobs: Sequence[TokenJob],
        shares: Sequence[PromptShare],
        emit: Emit,
    ) -> int:
        lock = asyncio.Lock()

        async def emit_alone(event: TextEvent) -> None:
            async with lock:
                await emit(event)

        async def run_one(index: int) -> int:
            job, share = jobs[index // request.n], shares[index // request.n]
            if index % request.n:
                await share.wait()
                job = _sibling(job, share, index % request.n)
            choice = Choice(index, job, request, self.model.tokenizer, emit_alone)
            return await self._run_one(choice, job, share)

        try:
            async with asyncio.TaskGroup() as group:
                indices = range(len(jobs) * request.n)
                tasks = [group.create_task(run_one(index)) for index in indices]
        except BaseExceptionGroup as failures:
            # The first one cancelled the others; the client gets one error.
            raise _in_words_of(request, failures.exceptions[0]) from None
        return sum(task.result() for task in tasks)

    async def _run_one(self, choice: Choice, job: TokenJob, share: PromptShare) -> int:
        timer = _Timer(self._metrics)

        async def on_chunk(chunk: TokenChunk) -> bool:
            timer.on_tokens(len(chunk.token_ids))
            charge(len(chunk.token_ids))
            share.learn(chunk)
            return await choice.on_chunk(chunk, share)

        reason = await self._dispatcher.generate(job, on_chunk)
        timer.on_end()
        await choice.end(reason)
        return choice.num_tokens


def _job(request: TextRequest, token_ids: Sequence[int], max_tokens: int) -> TokenJob:
    sampling = request.sampling
    if request.echo and sampling.logprobs is not None:
        num_top = max(sampling.logprobs, sampling.prompt_logprobs or 0)
        sampling = replace(sampling, prompt_logprobs=num_top)
    return TokenJob(
        prompt_token_ids=token_ids,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=secrets.randbits(64) if request.seed is None else request.seed,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        priority=request.priority,
        cache_salt=request.cache_salt,
        grammar="" if request.grammar is None else request.grammar.text,
    )


def _sibling(job: TokenJob, share: PromptShare, number: int) -> TokenJob:
    """For another choice of the same prompt, of which all is known by now."""
    return replace(
        job,
        sampling=replace(job.sampling, prompt_logprobs=None),
        seed=choice_seed(job.seed, number),
        prefers=share.inst_id,
    )


def _max_tokens(request: TextRequest, num_prompt_tokens: int, capacity: int) -> int:
    room = capacity - num_prompt_tokens
    if request.max_tokens is None:
        max_tokens = max(1, min(request.default_max_tokens, room))
    else:
        # Without any the worker still runs the prompt, and what it samples is dropped.
        max_tokens = max(1, request.max_tokens)
    if request.sampling.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens must be at most max_tokens", param="min_tokens")
    if max_tokens > room:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and {max_tokens} are to be generated, but "
            f"one request can use {capacity} tokens here",
            param="max_tokens" if room > 0 else request.prompt_param,
        )
    return max_tokens


def _in_words_of(request: TextRequest, error: BaseException) -> BaseException:
    """A worker does not know which field of the client's became the grammar."""
    if request.grammar is None or not isinstance(error, InvalidRequest) or error.param != "grammar":
        return error
    return InvalidRequest(error.message, param=request.grammar.param)


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
        if self._first_s is None and num_tokens:
            self._first_s = time.monotonic()
            self._metrics.time_to_first_token.observe(self._first_s - self._start_s)

    def on_end(self) -> None:
        now_s = time.monotonic()
        self._metrics.end_to_end.observe(now_s - self._start_s)
        if self._first_s is not None and self._num_tokens > 1:
            per_token_s = (now_s - self._first_s) / (self._num_tokens - 1)
            self._metrics.time_per_output_token.observe(per_token_s)
