"""Runs one sequence on an instance, and on another when that is lost: token ids out as they come.

Called by generation, once per sequence. Nothing outlives `generate`: when it is cancelled (the
client left) the call to the worker is cancelled too, which makes the worker abort the request.
"""

import logging
import time
from collections.abc import Awaitable, Callable

from services.common.ids import new_req_id
from services.router.capacity import Room, max_request_tokens
from services.router.discovery import Discovery
from services.router.interruption import Interruptions
from services.router.metrics import RouterMetrics
from services.router.patience import Patience
from services.router.recovery import Recovery
from services.router.routing import Dispatched, Instance, pick
from services.router.token_job import FinishReason, TokenChunk, TokenJob
from services.router.turns import QueueLimits, Turns
from services.router.worker_call import CallFailed, StreamTimeouts, WorkerCalls
from services.router.worker_channels import WorkerChannels

#: Takes what the worker sent; returns True when the sequence needs no more.
OnChunk = Callable[[TokenChunk], Awaitable[bool]]

_log = logging.getLogger(__name__)


class Dispatcher:
    """Owner of the calls to workers and of the count of what was sent to each."""

    def __init__(
        self,
        discovery: Discovery,
        channels: WorkerChannels,
        timeouts: StreamTimeouts,
        limits: QueueLimits,
        metrics: RouterMetrics,
    ) -> None:
        self._discovery = discovery
        self._resume_s = timeouts.resume_s
        self._patience = Patience()
        self._calls = WorkerCalls(channels, timeouts, self._patience)
        self._metrics = metrics
        self._dispatched = Dispatched()
        self._turns = Turns(limits, self._room, self._patience)
        metrics.queued.set_function(lambda: self._turns.num_waiting)

    def end_by(self, end_s: float) -> None:
        """Whatever still runs at that time of the loop's clock ends with Unavailable."""
        self._patience.end_by(end_s)

    async def on_view(self) -> None:
        """After each new view: lets in who waited, and closes channels to instances that left."""
        self._turns.call_next()
        await self._calls.channels.prune({i.address for i in self._discovery.instances})

    async def close(self) -> None:
        await self._calls.channels.close()

    async def generate(self, job: TokenJob, on_chunk: OnChunk) -> FinishReason:
        """Returns why the sequence ended; raises when it did not end well.

        Where its instance is lost or full, another one goes on with what came so far.
        """
        with self._metrics.queue_time.time():
            await self._turns.wait(job)
        recovery = Recovery(job, self._resume_s, time.monotonic())
        with Interruptions(self._metrics) as interruptions:
            while not recovery.is_complete:
                instance = await self._instance_for(recovery)
                if recovery.num_failures:
                    self._metrics.retries.inc()
                try:
                    return await self._run_on(instance, recovery, on_chunk, interruptions)
                except CallFailed as failed:
                    if self._patience.is_over:
                        raise failed.error from failed
                    if recovery.has_begun:
                        interruptions.begin(instance.inst_id, recovery.num_tokens, failed.reason)
                    if not recovery.fail(instance, failed.error, time.monotonic()):
                        raise recovery.error from failed
        return "length"

    async def _instance_for(self, recovery: Recovery) -> Instance:
        """The best one now; after a failure there may be one only in a while."""
        while True:
            now_s = time.monotonic()
            instance = self._pick(recovery, now_s)
            if instance is not None:
                return instance
            if now_s >= recovery.wait_until_s:
                raise recovery.error
            async with self._patience.limit(recovery.wait_until_s - now_s, recovery.error):
                await self._discovery.next_view()

    def _pick(self, recovery: Recovery, now_s: float) -> Instance | None:
        serving, job = self._discovery.serving, recovery.job
        excluded = recovery.excluded(serving, now_s)
        usable = [instance for instance in serving if instance.inst_id not in excluded]
        # A cluster that has shrunk may grow again; until then it would refuse.
        if recovery.num_failures and job.num_tokens > max_request_tokens(usable):
            return None
        pooling = self._discovery.is_pooling
        return pick(usable, job.num_tokens, self._dispatched, job.prefers, pooling)

    def _room(self) -> Room | None:
        instances = self._discovery.serving
        if not instances:
            return None
        return Room(instances, self._dispatched, self._discovery.is_pooling)

    async def _run_on(
        self,
        instance: Instance,
        recovery: Recovery,
        on_chunk: OnChunk,
        interruptions: Interruptions,
    ) -> FinishReason:
        req_id, job = new_req_id(), recovery.job
        detail = {"worker_req_id": req_id, "inst_id": instance.inst_id}
        _log.debug("dispatched", extra=detail)
        num_blocks = instance.blocks_for(job.num_start_tokens)
        self._dispatched.add(req_id, instance.inst_id, num_blocks, time.monotonic())
        try:
            with self._calls.open(instance, req_id, job) as call:
                while True:
                    chunk = await call.next()
                    interruptions.end(instance.inst_id)
                    recovery.receive(chunk)
                    if await on_chunk(chunk):
                        return "stop"
                    if chunk.finish_reason is not None:
                        return chunk.finish_reason
        except CallFailed as failed:
            _log.warning("worker failed", extra=detail | {"reason": failed.reason})
            raise
        finally:
            self._dispatched.remove(req_id, instance.inst_id)
            self._turns.call_next()
