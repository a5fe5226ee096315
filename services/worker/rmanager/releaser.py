"""Tells creditors what is no longer needed. Fed by the engine and the mover."""

import asyncio
import logging

import grpc

from protos.infinite_llm.v1 import worker_pb2
from services.common.rpc import PROBE_DEADLINE_S
from services.worker.distattention.debtor import Peer
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rmanager.clients import Clients
from services.worker.rmanager.peers import Peers

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class Releaser:
    """Releases are idempotent and retried until the creditor's own lease would have ended them.

    Each is a task of its own: a creditor that does not answer holds up nobody else's.
    """

    def __init__(self, me: Peer, peers: Peers, clients: Clients, lease_s: float) -> None:
        self._me = me
        self._peers = peers
        self._clients = clients
        self._lease_s = lease_s
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, span: RemoteSpan) -> None:
        """On the event loop's thread: give one span back, soon."""
        task = asyncio.create_task(self._release(span))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout_s: float = PROBE_DEADLINE_S) -> None:
        """Let what is under way end, for a while; the rest is left to its leases."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _release(self, span: RemoteSpan) -> None:
        give_up_s = asyncio.get_running_loop().time() + self._lease_s
        while not await self._send(span):
            if asyncio.get_running_loop().time() > give_up_s:
                logger.warning(
                    "leaving %d blocks on instance %d to their lease", span.num_blocks, span.inst_id
                )
                return
            await asyncio.sleep(_RETRY_S)

    async def _send(self, span: RemoteSpan) -> bool:
        """False if the creditor did not answer."""
        stub = self._clients.known(span.inst_id, span.incarnation)
        request = worker_pb2.ReleaseKvCacheRequest(
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
