"""Moves full blocks to creditors: reserve, copy, acknowledge, commit at a step boundary, free.

Until the commit the source's copy is the truth, so whatever fails before it loses nothing. Orders
come from the scheduler (memory is short now: as fast as it goes) and from the gManager (the plan:
at a pace that does not slow decoding).
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.common.errors import PartLost
from services.common.ids import ReqId
from services.worker.distattention.debtor import Peer
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import MoveOrder
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rmanager.block_copy import BlockCopy
from services.worker.rmanager.pace import Pace
from services.worker.rmanager.peers import PeerView
from services.worker.rmanager.transfer_parts import TransferParts

logger = logging.getLogger(__name__)


class Mover:
    """Runs one order at a time per sequence; the copies of all share one thread."""

    def __init__(self, parts: TransferParts, pace: Pace) -> None:
        self._parts = parts
        self._pace = pace
        self._one_planned = asyncio.Lock()
        """Planned moves share one pace: the next begins when the one before it is over."""
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="mover")
        self.moved_blocks = 0
        self.failed_moves = 0
        """Orders of which nothing was moved: refused, failed, or void."""

    async def move_planned(self, req_id: ReqId, num_blocks: int, destination: PeerView) -> int:
        """One after the other. Nothing is moving before its turn: what is urgent does not wait."""
        async with self._one_planned:
            order = await self._parts.engine.ask(
                lambda s: s.placement.begin_move(req_id, num_blocks)
            )
            return 0 if order is None else await self.move(order, destination)

    async def move(self, order: MoveOrder, destination: PeerView | None = None) -> int:
        """Move what creditors take of the order, oldest first; returns the blocks committed.

        A planned `destination` is asked for all of it; otherwise whoever has room is asked, or, for
        a claimant, whoever has not to make some.
        """
        moved = 0
        loop = asyncio.get_running_loop()
        try:
            with self._parts.trace_of(order.req_id):
                if order.claimant is not None:
                    moved = await self._claim(order)
                else:
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
        if destination is not None:
            is_moved = await self._move_to(destination, order, order.block_ids, self._pace)
            return len(order.block_ids) if is_moved else 0
        moved, wanted = 0, len(order.block_ids)
        for creditor in await self._parts.reserver.find_creditors(order.req_id, wanted):
            rest = order.block_ids[moved:]
            taken = rest[: self._parts.peers.lendable(creditor)]
            if taken and await self._move_to(creditor, order, taken):
                moved += len(taken)
        return moved

    async def _claim(self, order: MoveOrder) -> int:
        """One creditor at a time makes room for all of the order, or for what it can."""
        for creditor in self._parts.peers.everyone:
            if await self._move_to(creditor, order, order.block_ids):
                return len(order.block_ids)
            part = order.block_ids[: self._parts.peers.room_on(creditor.inst_id)]
            if part and await self._move_to(creditor, order, part):
                return len(part)
        return 0

    async def _move_to(
        self,
        creditor: PeerView,
        order: MoveOrder,
        block_ids: Sequence[int],
        pace: Pace | None = None,
    ) -> bool:
        # The sequence may have given its blocks up: then the order is void.
        if not await self._is_current(order):
            return False
        span = await self._parts.reserver.reserve(
            creditor, order.rank, len(block_ids), order.claimant
        )
        if span is None:
            return False
        peer = Peer(creditor.inst_id, creditor.incarnation, creditor.data_address)
        is_committed = False
        try:
            copy = BlockCopy(self._parts, peer, span.move_id, block_ids)
            if await self._copy(copy, order, pace):
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

    async def _copy(self, copy: BlockCopy, order: MoveOrder, pace: Pace | None) -> bool:
        """False where the order became void meanwhile."""
        loop = asyncio.get_running_loop()
        try:
            while copy.num_left:
                num_blocks = await self._next_piece(order, pace) if pace else copy.num_left
                if num_blocks == 0:
                    return False
                await loop.run_in_executor(self._copy_thread, copy.send, num_blocks)
            return True
        finally:
            # Behind whatever is still being sent.
            self._copy_thread.submit(copy.close)

    async def _next_piece(self, order: MoveOrder, pace: Pace) -> int:
        """Blocks to copy now, after as many steps as they should wait; 0 once the order is void.

        Where memory became short meanwhile, nothing waits any more; nor where steps are so slow
        that the reservation would end, which each piece renews.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._parts.reserver.shortest_lease_s / 2
        for _ in range(pace.steps_per_piece):
            if loop.time() > end_s:
                break
            is_current, is_short = await self._parts.engine.ask(
                lambda s: (s.placement.is_current(order), s.placement.missing_to_grow()[0] > 0)
            )
            if not is_current:
                return 0
            if is_short:
                return len(order.block_ids)
        return pace.blocks_per_piece

    async def _is_current(self, order: MoveOrder) -> bool:
        return await self._parts.engine.ask(lambda s: s.placement.is_current(order))

    def _commit(self, peer: Peer, order: MoveOrder, span: RemoteSpan) -> Awaitable[bool]:
        def commit(scheduler: Scheduler) -> bool:
            self._parts.channels.learn(peer)
            return scheduler.placement.commit_move(order, span)

        return self._parts.engine.ask(commit)
