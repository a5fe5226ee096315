"""Runs one sequence on an instance: token ids out as they come, errors as the tree has them.

Called by generation, once per sequence. Nothing outlives `generate`: when it is cancelled (the
client left) the call to the worker is cancelled too, which makes the worker abort the request.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

import grpc

from protos.infinite_llm.v1 import worker_pb2
from services.common.errors import (
    DeadlineExceeded,
    InfiniteLLMError,
    InstanceLost,
    Overloaded,
    Unavailable,
)
from services.common.ids import InstId, new_req_id
from services.common.rpc import error_from_rpc
from services.router.discovery import Discovery
from services.router.metrics import RouterMetrics
from services.router.routing import Dispatched, Instance, pick
from services.router.token_job import TokenChunk, TokenJob, from_wire, to_wire
from services.router.worker_channels import WorkerChannels

#: One instance and, when it fails before its first token, two others.
MAX_ATTEMPTS = 3
#: A refusal that took longer came out of a queue: the client has waited enough.
_RETRY_REFUSED_WITHIN_S = 5.0

FinishReason = Literal["stop", "length"]
#: Takes what the worker sent; returns True when the sequence needs no more.
OnChunk = Callable[[TokenChunk], Awaitable[bool]]

_FINISH_REASONS: dict[int, FinishReason] = {
    worker_pb2.FINISH_REASON_STOP: "stop",
    worker_pb2.FINISH_REASON_LENGTH: "length",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    first_token_s: float
    idle_s: float


@dataclass(slots=True)
class _Progress:
    has_tokens: bool = False


class Dispatcher:
    """Owner of the channels to workers and of the count of what was sent to each."""

    def __init__(
        self, discovery: Discovery, timeouts: StreamTimeouts, metrics: RouterMetrics
    ) -> None:
        self._discovery = discovery
        self._timeouts = timeouts
        self._metrics = metrics
        self._channels = WorkerChannels()
        self._dispatched = Dispatched()
        self._end_s = math.inf
        self._waiting: set[asyncio.Timeout] = set()

    def end_by(self, end_s: float) -> None:
        """Whatever still runs at that time of the loop's clock ends with Unavailable."""
        self._end_s = end_s
        for timeout in self._waiting:
            timeout.reschedule(min(end_s, timeout.when() or end_s))

    async def generate(self, job: TokenJob, on_chunk: OnChunk) -> FinishReason:
        """Returns why the sequence ended; raises when it did not end well.

        A sequence without tokens yet is tried again elsewhere when its instance is lost or full.
        """
        started_s = time.monotonic()
        failed: set[InstId] = set()
        error: InfiniteLLMError = Unavailable("no instance is ready")
        while len(failed) < MAX_ATTEMPTS:
            serving = self._discovery.serving
            instance = pick(serving, job.num_tokens, self._dispatched, failed, job.prefers)
            if instance is None:
                break
            if failed:
                self._metrics.retries.inc()
            progress = _Progress()
            try:
                return await self._run_on(instance, job, on_chunk, progress)
            except (Unavailable, InstanceLost, Overloaded) as caught:
                waited_s = time.monotonic() - started_s
                is_final = isinstance(caught, Overloaded) and waited_s > _RETRY_REFUSED_WITHIN_S
                if is_final or self._is_over():
                    raise
                if progress.has_tokens:
                    raise InstanceLost(f"instance {instance.inst_id} was lost") from caught
                error = caught
            failed.add(instance.inst_id)
        raise error

    @asynccontextmanager
    async def _limit(self, limit_s: float) -> AsyncIterator[None]:
        """TimeoutError after `limit_s`, or when everything has to end."""
        now_s = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(min(now_s + limit_s, self._end_s)) as timeout:
            self._waiting.add(timeout)
            try:
                yield
            finally:
                self._waiting.discard(timeout)

    def _is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self._end_s

    async def forget_departed(self) -> None:
        """Closes channels to instances that left; called after each new view."""
        await self._channels.prune({i.address for i in self._discovery.instances})

    async def close(self) -> None:
        await self._channels.close()

    async def _run_on(
        self, instance: Instance, job: TokenJob, on_chunk: OnChunk, progress: _Progress
    ) -> FinishReason:
        req_id = new_req_id()
        detail = {"worker_req_id": req_id, "inst_id": instance.inst_id}
        _log.debug("dispatched", extra=detail)
        num_blocks = instance.blocks_for(job.num_tokens)
        self._dispatched.add(req_id, instance.inst_id, num_blocks, time.monotonic())
        try:
            with self._channels.use(instance.address) as worker:
                call = worker.Generate(to_wire(req_id, job))
                try:
                    return await self._read(instance.inst_id, call, on_chunk, progress)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            translated = error_from_rpc(error)
            _log.warning("worker failed", extra=detail | {"reason": translated.message})
            if isinstance(translated, Unavailable):
                raise Unavailable(f"instance {instance.inst_id} is not reachable") from error
            raise translated from error
        finally:
            self._dispatched.remove(req_id)

    async def _read(
        self,
        inst_id: InstId,
        call: "grpc.aio.UnaryStreamCall[worker_pb2.GenerateTokensRequest, worker_pb2.GenerateTokensResponse]",  # noqa: E501
        on_chunk: OnChunk,
        progress: _Progress,
    ) -> FinishReason:
        responses = aiter(call)
        while True:
            limit_s = self._timeouts.idle_s if progress.has_tokens else self._timeouts.first_token_s
            try:
                async with self._limit(limit_s):
                    response = await anext(responses, None)
            except TimeoutError:
                if self._is_over():
                    raise Unavailable("the router is shutting down") from None
                raise DeadlineExceeded(f"the instance sent nothing for {limit_s:g} s") from None
            if response is None:
                raise InstanceLost("the instance ended the stream without a finish reason")
            progress.has_tokens = progress.has_tokens or bool(response.token_ids)
            if await on_chunk(from_wire(inst_id, response)):
                return "stop"
            if response.finish_reason == worker_pb2.FINISH_REASON_ABORT:
                raise InstanceLost("the instance gave the request up")
            if response.finish_reason in _FINISH_REASONS:
                return _FINISH_REASONS[response.finish_reason]
