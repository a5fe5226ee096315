"""The worker's gRPC services: generation for the router, the rManager for its peers."""

import math
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from services.common.ids import ReqId, new_req_id
from services.common.sampling import SamplingParams
from services.common.telemetry import req_id_context
from services.worker.drain import Drain
from services.worker.engine.engine import Engine
from services.worker.engine.sampling.state import TokenLogprobs
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import FinishReason, Request, SequenceOutput
from services.worker.rmanager.ranks import check_arrival
from services.worker.rmanager.rmanager import RManager
from services.worker.streams import Streams

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_FINISH = {
    FinishReason.STOP: worker_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: worker_pb2.FINISH_REASON_ABORT,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask of this instance and the peers that it knows."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        engine: Engine,
        streams: Streams,
        limits: Limits,
        rmanager: RManager,
        drain: Drain,
    ) -> None:
        self._engine = engine
        self._streams = streams
        self._limits = limits
        self._rmanager = rmanager
        self._drain = drain

    async def Generate(
        self, request: worker_pb2.GenerateTokensRequest, context: Context
    ) -> AsyncGenerator[worker_pb2.GenerateTokensResponse, None]:
        if self._rmanager.is_draining:
            raise Unavailable("the instance is draining")
        checked = self._check(request)
        req_id_context.set(checked.req_id)
        with self._streams.open(checked.req_id) as outputs:
            is_finished = False
            try:
                await self._submit(checked)
                while not is_finished:
                    output = await outputs.get()
                    if output.error is not None:
                        is_finished = True
                        raise output.error
                    is_finished = output.is_last
                    yield _response(output)
            finally:
                if not is_finished:
                    self._abort(checked.req_id)

    async def Abort(
        self, request: worker_pb2.AbortRequest, context: Context
    ) -> worker_pb2.AbortResponse:
        req_id = ReqId(request.req_id)

        def abort(scheduler: Scheduler) -> None:
            if scheduler.abort(req_id, time.monotonic()):
                ended = SequenceOutput(req_id, finish_reason=FinishReason.ABORT)
                self._streams.on_outputs([ended])

        await self._engine.ask(abort)
        return worker_pb2.AbortResponse()

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        if not 0 <= request.deadline_s < math.inf:
            raise InvalidRequest("deadline_s must be a number of seconds", "deadline_s")
        begin = self._drain.hold if request.stay else self._drain.begin
        await begin(request.deadline_s or None)
        remaining = self._drain.remaining
        return worker_pb2.DrainResponse(
            open_requests=remaining.num_requests, lent_blocks=remaining.num_lent_blocks
        )

    async def Undrain(
        self, request: worker_pb2.UndrainRequest, context: Context
    ) -> worker_pb2.UndrainResponse:
        await self._drain.cancel()
        return worker_pb2.UndrainResponse()

    async def _submit(self, request: Request) -> None:
        if not self._engine.is_alive:
            raise Unavailable("the engine has stopped")

        def add(scheduler: Scheduler) -> None:
            scheduler.add(request, time.monotonic())
            self._streams.on_added(request.req_id)

        await self._engine.ask(add)

    def _abort(self, req_id: ReqId) -> None:
        self._engine.call(lambda s: s.abort(req_id, time.monotonic()))

    def _check(self, request: worker_pb2.GenerateTokensRequest) -> Request:
        limits, prompt = self._limits, tuple(request.prompt_token_ids)
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        self._check_token_ids(prompt, "prompt")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", "max_tokens")
        capacity = min(limits.max_model_len, self._capacity_tokens())
        if len(prompt) + request.max_tokens > capacity:
            raise ContextLengthExceeded(
                f"{len(prompt)} prompt tokens and max_tokens {request.max_tokens} exceed the "
                f"{capacity} tokens that one request may use",
                "max_tokens" if len(prompt) < capacity else "prompt",
            )
        sampling = _sampling(request.sampling)
        self._check_token_ids(sampling.logit_bias, "logit_bias")
        self._check_token_ids(request.stop_token_ids, "stop_token_ids")
        if sampling.min_tokens > request.max_tokens:
            raise InvalidRequest("min_tokens must be at most max_tokens", "min_tokens")
        ends = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            ends |= limits.eos_token_ids
        return Request(
            ReqId(request.req_id) if request.req_id else new_req_id(),
            prompt,
            request.max_tokens,
            sampling,
            ends,
            request.priority,
            check_arrival(request.arrived_at_s) or time.time(),
            request.cache_salt,
            self._output_so_far(request, ends),
        )

    def _output_so_far(
        self, request: worker_pb2.GenerateTokensRequest, ends: frozenset[int]
    ) -> tuple[int, ...]:
        """Refuses what cannot be the beginning of this request's output."""
        param, output = "output_token_ids", tuple(request.output_token_ids)
        self._check_token_ids(output, param)
        if len(output) >= request.max_tokens:
            raise InvalidRequest("output_token_ids must be fewer than max_tokens", param)
        if not ends.isdisjoint(output):
            raise InvalidRequest("output_token_ids must not hold a token that ends", param)
        if output and request.sampling.temperature and not request.sampling.HasField("seed"):
            raise InvalidRequest("output_token_ids must come with the seed they had", "seed")
        return output

    def _check_token_ids(self, token_ids: Iterable[int], param: str) -> None:
        if max(token_ids, default=0) >= self._limits.vocab_size:
            raise InvalidRequest(f"token ids must be below {self._limits.vocab_size}", param)

    def _capacity_tokens(self) -> int:
        """KV that the whole cluster could give one request."""
        return (
            self._limits.num_blocks + self._rmanager.borrowable_blocks
        ) * self._limits.block_size


class RManagerServicer(worker_pb2_grpc.RManagerServicer):
    def __init__(self, rmanager: RManager) -> None:
        self._rmanager = rmanager

    async def MoveKvCache(
        self, request: worker_pb2.MoveKvCacheRequest, context: Context
    ) -> worker_pb2.MoveKvCacheResponse:
        return await self._rmanager.move_kvcache(request)

    async def TryMoveKvCache(
        self, request: worker_pb2.TryMoveKvCacheRequest, context: Context
    ) -> worker_pb2.TryMoveKvCacheResponse:
        return await self._rmanager.creditor.try_move_kvcache(request)

    async def RenewLeases(
        self, request: worker_pb2.RenewLeasesRequest, context: Context
    ) -> worker_pb2.RenewLeasesResponse:
        return self._rmanager.creditor.renew_leases(request)

    async def ReleaseKvCache(
        self, request: worker_pb2.ReleaseKvCacheRequest, context: Context
    ) -> worker_pb2.ReleaseKvCacheResponse:
        return self._rmanager.creditor.release_kvcache(request)

    async def RecallKvCache(
        self, request: worker_pb2.RecallKvCacheRequest, context: Context
    ) -> worker_pb2.RecallKvCacheResponse:
        return await self._rmanager.recall_kvcache(request)


def _sampling(params: types_pb2.SamplingParams) -> SamplingParams:
    # Unset travels as 0, which no caller can mean for top_p (an empty distribution) and
    # repetition_penalty (a division by it).
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        seed=params.seed if params.HasField("seed") else new_req_id(),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def _response(output: SequenceOutput) -> worker_pb2.GenerateTokensResponse:
    reason = worker_pb2.FINISH_REASON_UNSPECIFIED
    if output.finish_reason is not None:
        reason = _FINISH[output.finish_reason]
    return worker_pb2.GenerateTokensResponse(
        token_ids=output.token_ids,
        finish_reason=reason,
        cached_tokens=output.num_cached_tokens,
        logprobs=map(_logprobs, output.logprobs),
        prompt_logprobs=map(_logprobs, output.prompt_logprobs),
    )


def _logprobs(logprobs: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    return worker_pb2.TokenLogprobs(
        chosen=logprobs.chosen, top_token_ids=logprobs.top_token_ids, top=logprobs.top
    )
