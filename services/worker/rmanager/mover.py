"""Moves full blocks to creditors: reserve, copy, acknowledge, commit at a step boundary, free.

Until the commit the source's copy is the truth, so whatever fails before it loses nothing. Orders
come from the scheduler (memory is short now) and from the gManager (the plan).
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.common.errors import PartLost
from services.common.ids import MoveId
from services.worker.distattention.debtor import Peer
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import MoveOrder
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rmanager.peers import PeerView
from services.worker.rmanager.transfer_parts import TransferParts

logger = logging.getLogger(__name__)


class Mover:
    """Runs one order at a time per sequence; the copies of all share one thread."""

    def __init__(self, parts: TransferParts) -> None:
        self._parts = parts
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="mover")
        self.moved_blocks = 0
        self.failed_moves = 0
        """Orders of which nothing was moved: refused, failed, or void."""

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
            self._parts.engine.call(lambda s: s.placement.end_move(order, was_refused, loop.time()))
            self.moved_blocks += moved
            self.failed_moves += moved == 0
        return moved

    async def close(self) -> None:
        await asyncio.to_thread(self._copy_thread.shutdown)

    async def _move_all(self, order: MoveOrder, destination: PeerView | None) -> int:
        moved, wanted = 0, len(order.block_ids)
        find = self._parts.reserver.find_creditors
        for creditor in [destination] if destination else await find(order.req_id, wanted):
            rest = order.block_ids[moved:]
            room = len(rest) if destination else self._parts.peers.lendable(creditor)
            # The sequence may have given its blocks up: then the order is void.
            if not rest or not await self._is_current(order):
                break
            if room and await self._move_to(creditor, order, rest[:room]):
                moved += len(rest[:room])
        return moved

    async def _move_to(
        self, creditor: PeerView, order: MoveOrder, block_ids: Sequence[int]
    ) -> bool:
        span = await self._parts.reserver.reserve(creditor, order.req_id, len(block_ids))
        if span is None:
            return False
        peer = Peer(creditor.inst_id, creditor.incarnation, creditor.data_address)
        is_committed = False
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._copy_thread, self._copy, peer, span.move_id, block_ids)
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

    def _copy(self, peer: Peer, move_id: MoveId, block_ids: Sequence[int]) -> None:
        """On the copy thread: send the blocks and wait until all are acknowledged."""
        sender = self._parts.open_sender(peer)
        try:
            sender.send_blocks(move_id, (self._parts.storage.block(b) for b in block_ids))
        finally:
            sender.close()

    async def _is_current(self, order: MoveOrder) -> bool:
        return await asyncio.wrap_future(
            self._parts.engine.call(lambda s: s.placement.is_current(order))
        )

    def _commit(self, peer: Peer, order: MoveOrder, span: RemoteSpan) -> Awaitable[bool]:
        def commit(scheduler: Scheduler) -> bool:
            self._parts.channels.learn(peer)
            return scheduler.placement.commit_move(order, span)

        return asyncio.wrap_future(self._parts.engine.call(commit))
