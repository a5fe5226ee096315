"""Moves full blocks to creditors: reserve, copy, acknowledge, commit at a step boundary, free.

Until the commit the source's copy is the truth, so whatever fails before it loses nothing. Orders
come from the scheduler (memory is short now) and from the gManager (the plan).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import grpc

from protos.infinite_llm.v1 import gmanager_pb2, worker_pb2
from services.common.errors import PartLost
from services.common.ids import MoveId, ReqId, new_move_id
from services.common.rpc import CONTROL_DEADLINE_S, PROBE_DEADLINE_S
from services.worker.distattention.debtor import Peer
from services.worker.distattention.transfer import BlockSender
from services.worker.engine.attention import ChannelPool
from services.worker.engine.engine import Engine
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import MoveOrder
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.kvcache.storage import KvStorage
from services.worker.rmanager.clients import Clients, peer_view
from services.worker.rmanager.peers import Peers, PeerView

logger = logging.getLogger(__name__)

#: The trace that a request's control calls belong to, while it lasts.
TraceOf = Callable[[ReqId], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class MoverParts:
    """What the mover works with; all owned elsewhere."""

    me: Peer
    storage: KvStorage
    engine: Engine
    channels: ChannelPool
    peers: Peers
    clients: Clients
    open_sender: Callable[[Peer], BlockSender]
    release: Callable[[RemoteSpan], None]
    trace_of: TraceOf


class Mover:
    """Runs one order at a time per sequence; the copies of all share one thread."""

    def __init__(self, parts: MoverParts) -> None:
        self._parts = parts
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="mover")
        self.moved_blocks = 0
        self.failed_moves = 0
        """Orders of which nothing was moved: refused, failed, or void."""
        self.shortest_lease_s = float("inf")
        """Of all that creditors granted: what is lent must be renewed before it ends."""

    async def move(self, order: MoveOrder, destination: PeerView | None = None) -> int:
        """Move what creditors take of the order, oldest first; returns the blocks committed.

        A planned `destination` is asked for all of it; otherwise whoever has room is asked.
        """
        moved = 0
        loop = asyncio.get_running_loop()
        try:
            with self._parts.trace_of(order.req_id):
                moved = await self._move_all(order, destination)
        finally:
            was_refused = moved == 0 and destination is None
            self._parts.engine.call(lambda s: s.end_move(order, was_refused, loop.time()))
            self.moved_blocks += moved
            self.failed_moves += moved == 0
        return moved

    async def close(self) -> None:
        await asyncio.to_thread(self._copy_thread.shutdown)

    async def _move_all(self, order: MoveOrder, destination: PeerView | None) -> int:
        moved = 0
        candidates = [destination] if destination else await self._find_creditors(order)
        for creditor in candidates:
            rest = order.block_ids[moved:]
            room = len(rest) if destination else self._parts.peers.lendable(creditor)
            # The sequence may have given its blocks up: then the order is void.
            if not rest or not await self._is_current(order):
                break
            if room and await self._move_to(creditor, order, rest[:room]):
                moved += len(rest[:room])
        return moved

    async def _find_creditors(self, order: MoveOrder) -> list[PeerView]:
        """Urgent: ask the gManager now; when it is away, use the view that it gave last."""
        request = gmanager_pb2.FindCreditorsRequest(
            inst_id=self._parts.me.inst_id, req_id=order.req_id, num_blocks=len(order.block_ids)
        )
        try:
            answer = await self._parts.clients.gmanager.ask(
                lambda gmanager: gmanager.FindCreditors(request, timeout=PROBE_DEADLINE_S)
            )
        except grpc.aio.AioRpcError as error:
            logger.warning("using the last view of creditors: %s", error.code().name)
            return self._parts.peers.best_creditors()
        return self._parts.peers.best_creditors([peer_view(view) for view in answer.creditors])

    async def _move_to(
        self, creditor: PeerView, order: MoveOrder, block_ids: Sequence[int]
    ) -> bool:
        move_id = new_move_id()
        span = RemoteSpan(
            order.req_id, creditor.inst_id, creditor.incarnation, move_id, len(block_ids)
        )
        if not await self._reserve(creditor, order, span):
            return False
        peer = Peer(creditor.inst_id, creditor.incarnation, creditor.data_address)
        is_committed = False
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._copy_thread, self._copy, peer, move_id, block_ids)
            is_committed = await self._commit(peer, order, span)
        except PartLost as error:
            # A block that was given up while it was copied does not match its checksum: not the
            # creditor's fault.
            if await self._is_current(order):
                logger.warning("copy failed, nothing is lost: %s", error)
                self._parts.peers.forget(creditor.inst_id)
        finally:
            if not is_committed:
                self._parts.release(span)
        return is_committed

    async def _reserve(self, creditor: PeerView, order: MoveOrder, span: RemoteSpan) -> bool:
        """try_move_kvcache (paper section 6): first come, first served, or refused."""
        request = worker_pb2.TryMoveKvCacheRequest(
            req_id=order.req_id,
            num_blocks=span.num_blocks,
            source_inst_id=self._parts.me.inst_id,
            source_incarnation=self._parts.me.incarnation,
            move_id=span.move_id,
            dst_incarnation=span.incarnation,
        )
        stub = self._parts.clients.rmanager(creditor)
        try:
            answer = await stub.TryMoveKvCache(request, timeout=CONTROL_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            logger.warning("instance %d did not answer: %s", creditor.inst_id, error.code().name)
            self._parts.peers.forget(creditor.inst_id)
            # It may have granted before the answer was lost.
            self._parts.release(span)
            return False
        self._parts.peers.learn_free(creditor.inst_id, answer.free_blocks)
        if answer.granted:
            self.shortest_lease_s = min(self.shortest_lease_s, answer.lease_s)
        if not answer.granted:
            logger.info("instance %d refused: %s", creditor.inst_id, answer.reason)
        return answer.granted

    def _copy(self, peer: Peer, move_id: MoveId, block_ids: Sequence[int]) -> None:
        """On the copy thread: send the blocks and wait until all are acknowledged."""
        sender = self._parts.open_sender(peer)
        try:
            sender.send_blocks(move_id, (self._parts.storage.block(b) for b in block_ids))
        finally:
            sender.close()

    async def _is_current(self, order: MoveOrder) -> bool:
        return await asyncio.wrap_future(self._parts.engine.call(lambda s: s.is_current(order)))

    def _commit(self, peer: Peer, order: MoveOrder, span: RemoteSpan) -> Awaitable[bool]:
        def commit(scheduler: Scheduler) -> bool:
            self._parts.channels.learn(peer)
            return scheduler.commit_move(order, span)

        return asyncio.wrap_future(self._parts.engine.call(commit))
