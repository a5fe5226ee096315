"""Tells creditors what is no longer needed. Fed by the engine and the mover, one task drains it."""

import asyncio
import logging
from dataclasses import dataclass

import grpc

from protos.infinite_llm.v1 import worker_pb2
from services.common.rpc import PROBE_DEADLINE_S
from services.worker.distattention.debtor import Peer
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rmanager.clients import Clients
from services.worker.rmanager.peers import Peers

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class _Release:
    span: RemoteSpan
    give_up_s: float


class Releaser:
    """Releases are idempotent and retried until the creditor's own lease would have ended them."""

    def __init__(self, me: Peer, peers: Peers, clients: Clients, lease_s: float) -> None:
        self._me = me
        self._peers = peers
        self._clients = clients
        self._lease_s = lease_s
        self._queue: asyncio.Queue[_Release] = asyncio.Queue()

    def release(self, span: RemoteSpan) -> None:
        """On the event loop's thread: give one span back, soon."""
        give_up_s = asyncio.get_running_loop().time() + self._lease_s
        self._queue.put_nowait(_Release(span, give_up_s))

    async def run(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            results = await asyncio.gather(*(self._send(release) for release in batch))
            failed = [r for r, is_done in zip(batch, results, strict=True) if not is_done]
            if failed:
                await asyncio.sleep(_RETRY_S)
            for release in failed:
                self._queue.put_nowait(release)

    async def flush(self) -> None:
        """One last try for what is queued, at shutdown."""
        batch = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        await asyncio.gather(*(self._send(release) for release in batch))

    async def _send(self, release: _Release) -> bool:
        """True when done with it: released, replaced by a new process, or left to its lease."""
        span = release.span
        if asyncio.get_running_loop().time() > release.give_up_s:
            logger.warning("leaving request %d on instance %d to its lease",
                           span.req_id, span.inst_id)  # fmt: skip
            return True
        stub = self._clients.creditor(span.inst_id, span.incarnation)
        request = worker_pb2.ReleaseKvCacheRequest(
            req_id=span.req_id,
            owner_inst_id=self._me.inst_id,
            owner_incarnation=self._me.incarnation,
            move_id=span.move_id,
        )
        try:
            answer = await stub.ReleaseKvCache(request, timeout=PROBE_DEADLINE_S)
        except grpc.aio.AioRpcError:
            return False
        self._peers.learn_free(span.inst_id, answer.free_blocks)
        return True
