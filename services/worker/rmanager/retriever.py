"""Brings back what a creditor asks for: to other creditors, else here, else by giving it up.

The owner's side of a recall. Until the commit between two steps the creditor's copy is the truth
and steps go on reading it, so whatever fails before loses nothing: the creditor asks again.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

from services.common.errors import PartLost
from services.common.ids import InstId, MoveId
from services.worker.distattention.debtor import Peer
from services.worker.engine.scheduler import Scheduler
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rank import Rank
from services.worker.rmanager.transfer_parts import TransferParts

logger = logging.getLogger(__name__)

#: A creditor, and what it granted.
_Target = tuple[Peer, RemoteSpan]


class Retriever:
    """Retrieves one span after the other, so that no more is given up than must be."""

    def __init__(self, parts: TransferParts) -> None:
        self._parts = parts
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="retriever")
        self._under_way: dict[MoveId, asyncio.Task[None]] = {}
        self._one_by_one = asyncio.Lock()
        self.taken_back_blocks = 0
        self.lent_on_blocks = 0

    async def retrieve(
        self, source: Peer, move_ids: Collection[MoveId], claimant: Rank | None
    ) -> bool:
        """Returns once it is under way; False if nothing of these moves is used here (any more).

        `claimant`: who needs the memory, so that only younger ones give way; None: everybody does.
        """
        creditor, wanted = (source.inst_id, source.incarnation), frozenset(move_ids)
        spans = await self._parts.engine.ask(lambda s: s.blocks.recalled(creditor, wanted))
        for span in spans:
            if span.move_id not in self._under_way:
                task = asyncio.create_task(self._retrieve(source, span, claimant))
                self._under_way[span.move_id] = task
                task.add_done_callback(partial(self._on_done, span.move_id))
        return bool(spans)

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._copy_thread.shutdown)

    async def _retrieve(self, source: Peer, span: RemoteSpan, claimant: Rank | None) -> None:
        async with self._one_by_one:
            try:
                with self._parts.trace_of(span.req_id):
                    if not await self._lend_on(source, span):
                        await self._take_back(source, span, claimant)
            except PartLost as error:
                logger.warning("cannot give back yet, nothing is lost: %s", error)

    def _on_done(self, move_id: MoveId, task: asyncio.Task[None]) -> None:
        del self._under_way[move_id]
        if not task.cancelled() and task.exception() is not None:
            logger.error("recall failed", exc_info=task.exception())

    # -- to other creditors ------------------------------------------------------------------------

    async def _lend_on(self, source: Peer, span: RemoteSpan) -> bool:
        """False where others have no room for all of it together; needs no memory here."""
        unfit = {source.inst_id}
        while True:
            rank = await self._parts.engine.ask(lambda s: s.placement.rank_of(span))
            if rank is None:
                return True
            targets = await self._reserve(span, rank, unfit)
            if not targets:
                return False
            is_committed = False
            try:
                await self._on_copy_thread(partial(self._relay, source, span, targets))
                is_committed = await self._commit_lent_on(span, targets)
                self.lent_on_blocks += span.num_blocks if is_committed else 0
                return True
            except PartLost as error:
                if error.inst_id == source.inst_id:
                    raise
                logger.warning("cannot lend on, nothing is lost: %s", error)
                self._parts.peers.forget(error.inst_id)
                unfit.add(error.inst_id)
            finally:
                if not is_committed:
                    for _, target in targets:
                        self._parts.release(target)

    async def _reserve(self, span: RemoteSpan, rank: Rank, unfit: Set[InstId]) -> list[_Target]:
        """Room for the whole span, on one creditor if one has as much; empty where there is not."""
        peers, num_left = self._parts.peers, span.num_blocks
        creditors = await self._parts.reserver.find_creditors(span.req_id, num_left)
        targets: list[_Target] = []
        for creditor in sorted(creditors, key=lambda c: peers.lendable(c) < span.num_blocks):
            num_blocks = min(num_left, peers.lendable(creditor))
            if creditor.inst_id in unfit or num_blocks < 1:
                continue
            target = await self._parts.reserver.reserve(creditor, rank, num_blocks)
            if target is not None:
                peer = Peer(creditor.inst_id, creditor.incarnation, creditor.data_address)
                targets.append((peer, target))
                num_left -= num_blocks
        if num_left == 0:
            return targets
        for _, target in targets:
            self._parts.release(target)
        return []

    def _relay(self, source: Peer, span: RemoteSpan, targets: Sequence[_Target]) -> None:
        """On the copy thread: block by block through memory that is nobody's."""
        block = memoryview(bytearray(self._parts.storage.shape.block_bytes))
        indices = iter(range(span.num_blocks))
        with closing(self._parts.open_fetcher(source)) as fetcher:
            for peer, target in targets:
                with closing(self._parts.open_sender(peer)) as sender:
                    for number in range(target.num_blocks):
                        fetcher.fetch_blocks(span.move_id, [block], next(indices))
                        sender.send_block(target.move_id, number, block)

    async def _commit_lent_on(self, span: RemoteSpan, targets: Sequence[_Target]) -> bool:
        def commit(scheduler: Scheduler) -> bool:
            for peer, _ in targets:
                self._parts.channels.learn(peer)
            return scheduler.placement.lend_on(span, [target for _, target in targets])

        return await self._parts.engine.ask(commit)

    # -- back here --------------------------------------------------------------------------------

    async def _take_back(self, source: Peer, span: RemoteSpan, claimant: Rank | None) -> None:
        """Into free blocks, which the youngest requests give up where there are too few."""
        now_s = asyncio.get_running_loop().time()
        block_ids = await self._parts.engine.ask(
            lambda s: s.placement.make_room(span, claimant, now_s)
        )
        if block_ids is None:
            return  # whoever used it gave way, or goes before the claimant
        is_committed = False
        try:
            await self._on_copy_thread(lambda: self._fetch(source, span.move_id, block_ids))
            is_committed = await self._parts.engine.ask(
                lambda s: s.placement.take_back(span, block_ids)
            )
            self.taken_back_blocks += span.num_blocks if is_committed else 0
        finally:
            if not is_committed:
                self._parts.engine.call(lambda s: s.blocks.pool.free(block_ids))

    def _fetch(self, source: Peer, move_id: MoveId, block_ids: Sequence[int]) -> None:
        """On the copy thread."""
        with closing(self._parts.open_fetcher(source)) as fetcher:
            fetcher.fetch_blocks(move_id, [self._parts.storage.block(b) for b in block_ids])

    async def _on_copy_thread(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._copy_thread, function)
