"""The worker's gRPC services: generation for the router, the rManager for its peers."""

import math
import time
from collections.abc import AsyncGenerator
from typing import Any, TypeAlias

import grpc

from protos.infinite_llm.v1 import worker_pb2, worker_pb2_grpc
from services.common.errors import InvalidRequest, Unavailable
from services.common.ids import ReqId
from services.common.telemetry import req_id_context
from services.worker.drain import Drain
from services.worker.engine.engine import Engine
from services.worker.engine.sampling.state import TokenLogprobs
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import FinishReason, Request, SequenceOutput
from services.worker.request_checks import RequestChecks
from services.worker.rmanager.rmanager import RManager
from services.worker.streams import Streams

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_FINISH = {
    FinishReason.STOP: worker_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: worker_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: worker_pb2.FINISH_REASON_ABORT,
}


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self,
        engine: Engine,
        streams: Streams,
        checks: RequestChecks,
        rmanager: RManager,
        drain: Drain,
    ) -> None:
        self._engine = engine
        self._streams = streams
        self._checks = checks
        self._rmanager = rmanager
        self._drain = drain

    async def Generate(
        self, request: worker_pb2.GenerateTokensRequest, context: Context
    ) -> AsyncGenerator[worker_pb2.GenerateTokensResponse, None]:
        if self._rmanager.is_draining:
            raise Unavailable("the instance is draining")
        checked = await self._checks.check(request)
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
