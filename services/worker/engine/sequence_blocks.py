"""The blocks of sequences: where they come from, where they go, what of them is found again. Pure.

Stands between the scheduler, which decides who may have memory, and the pool and the creditors,
which have it. Knows no queue and no order of requests.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from services.common.ids import Incarnation, InstId, MoveId
from services.worker.engine.sequence import MoveOrder, Sequence
from services.worker.kvcache.block_hash import BlockHash
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.kvcache.remote_prefixes import RemotePrefixes
from services.worker.rank import Rank


@dataclass(slots=True)
class CacheCounts:
    """Prompt tokens that could have been cached, and those that were; since the start."""

    asked_tokens: int = 0
    hit_tokens: int = 0


class SequenceBlocks:
    """Grows, shares, lends and gives up the blocks of sequences."""

    def __init__(self, pool: BlockPool, keep_remote_s: float, is_caching: bool) -> None:
        """`keep_remote_s`: how long a prefix that lies on a creditor outlives its last user."""
        self.pool = pool
        self.counts = CacheCounts()
        self._is_caching = is_caching
        self._remote = RemotePrefixes(keep_remote_s if is_caching else 0.0)
        self._released: list[RemoteSpan] = []
        self._num_orders = 0

    @property
    def remote_spans(self) -> list[RemoteSpan]:
        """All that creditors hold for this instance, for running sequences or kept for later."""
        return self._remote.spans

    def take_released(self) -> list[RemoteSpan]:
        """Spans that nothing needs any more; the caller tells their creditors."""
        released, self._released = self._released, []
        return released

    # -- prefixes ---------------------------------------------------------------------------------

    def blocks_to_start(self, sequence: Sequence) -> int:
        """Free blocks that a waiting sequence needs for the tokens it knows and the next one.

        What creditors hold of its beginning, or running sequences, costs nothing.
        """
        spans, hashes = self._known_prefix(sequence)
        num_remote = sum(span.num_blocks for span in spans)
        shared = self.pool.num_held(hashes[num_remote:])
        return sequence.table.blocks_to_reach(sequence.num_tokens + 1) - num_remote - shared

    def start(self, sequence: Sequence) -> None:
        """Hold whatever of the sequence's beginning is computed already, here or on creditors."""
        spans, hashes = self._known_prefix(sequence)
        self._remote.hold(spans)
        sequence.table.attach(spans)
        sequence.table.grow(self.pool.reuse(hashes[sequence.table.num_blocks :]))
        sequence.num_computed = sequence.table.num_blocks * sequence.table.block_size
        if sequence.num_cached_tokens is None:
            # Only the first start counts: what a preempted sequence finds again is its own.
            num_prompt = len(sequence.request.prompt_token_ids)
            sequence.num_cached_tokens = min(sequence.num_computed, num_prompt)
            self.counts.asked_tokens += num_prompt
            self.counts.hit_tokens += sequence.num_cached_tokens

    def name_full_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        """Blocks that were filled by computing these tokens can be found by others from now on."""
        table = sequence.table
        first, stop = start // table.block_size, end // table.block_size
        if first == stop or not self._is_caching:
            return
        sequence.hash_full_blocks(end)
        for index in range(first, stop):
            self.pool.name(table.block_id(index), sequence.hashes[index])

    def _known_prefix(self, sequence: Sequence) -> tuple[list[RemoteSpan], list[BlockHash]]:
        """Spans to begin with, and the hashes of all blocks that may be found.

        At least one token is left to compute: its logits are wanted. Where logits of the whole
        prompt are wanted, all of it is.
        """
        if not self._is_caching or sequence.wants_prompt_logprobs:
            return [], []
        sequence.hash_full_blocks(sequence.num_tokens)
        hashes = sequence.hashes[: (sequence.num_tokens - 1) // sequence.table.block_size]
        spans = self._remote.find(hashes)
        num_remote = sum(span.num_blocks for span in spans)
        if self.pool.num_known(hashes) >= num_remote + self.pool.num_known(hashes[num_remote:]):
            spans = []
        return spans, hashes

    # -- growing and giving up --------------------------------------------------------------------

    def grow(self, sequence: Sequence, wanted: int) -> int:
        """Allocate for the first `wanted` tokens of the next chunk, or what there is.

        Returns the tokens that fit.
        """
        table, start = sequence.table, sequence.next_chunk.start
        if table.reaches(start + wanted):
            return wanted
        absent = table.absent
        needed = min(-(-(start + wanted) // table.block_size) - absent.start, len(absent))
        if needed <= 0:
            return wanted
        blocks = None
        while needed > 0 and blocks is None:
            needed = min(needed, self.pool.num_free)
            blocks = self.pool.try_allocate(needed)
        if blocks:
            table.grow(blocks)
        return min(wanted, table.absent.start * table.block_size - start)

    def give_up(self, sequence: Sequence, now_s: float, *, keep_remote: bool) -> None:
        """The sequence holds nothing any more; moves of its blocks that are under way are void."""
        local, remote = sequence.table.clear()
        self.pool.free(local)
        self._released += self._remote.let_go(remote, now_s)
        if not keep_remote:
            self.drop_idle_remote()
        sequence.num_computed, sequence.holes = 0, []
        sequence.order = 0

    # -- lending ----------------------------------------------------------------------------------

    def begin_move(
        self, sequence: Sequence, num_blocks: int, claimant: Rank | None
    ) -> MoveOrder | None:
        """Take the oldest `num_blocks` movable blocks for a move.

        None if a creditor holds them already, for another sequence: then that copy is used.
        """
        if self._adopt(sequence):
            return None
        self._num_orders += 1
        sequence.moving = sequence.movable_blocks[:num_blocks]
        sequence.order = self._num_orders
        block_ids = tuple(sequence.table.block_id(index) for index in sequence.moving)
        return MoveOrder(sequence.rank, sequence.order, block_ids, claimant)

    def commit_move(self, sequence: Sequence, span: RemoteSpan) -> bool:
        """The creditor's copy of the oldest moving blocks becomes the truth; False if so many are
        not moving."""
        if span.num_blocks > len(sequence.moving):
            return False
        moved = sequence.moving[: span.num_blocks]
        sequence.moving = sequence.moving[span.num_blocks :]
        sequence.hash_full_blocks(moved.stop * sequence.table.block_size)
        self._remote.add(span, sequence.hashes[moved.start : moved.stop])
        self.pool.free(sequence.table.commit_move(moved.start, span))
        return True

    # -- recalls ----------------------------------------------------------------------------------

    def recalled(
        self, creditor: tuple[InstId, Incarnation], move_ids: Collection[MoveId]
    ) -> list[RemoteSpan]:
        """What sequences use of these moves; what nobody uses is given back at once."""
        spans = [
            span
            for span in self._remote.spans
            if span.move_id in move_ids and (span.inst_id, span.incarnation) == creditor
        ]
        self._released += self._remote.give_back([span.move_id for span in spans])
        return [span for span in spans if self.is_used(span)]

    def is_used(self, span: RemoteSpan) -> bool:
        return self._remote.is_held(span)

    def take_back(
        self, sequences: Iterable[Sequence], span: RemoteSpan, block_ids: list[int]
    ) -> bool:
        """These blocks become the truth for all who used the span; False if nobody does now."""
        if not self.is_used(span):
            return False
        users = [sequence for sequence in sequences if span in sequence.table.remote]
        for _ in users[1:]:
            self.pool.share(block_ids)
        for sequence in users:
            sequence.table.take_back(span, block_ids)
        hashes = self._remote.take_back(span)
        if self._is_caching:
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                self.pool.name(block_id, block_hash)
        self._released.append(span)
        return True

    def lend_on(
        self, sequences: Iterable[Sequence], span: RemoteSpan, by: list[RemoteSpan]
    ) -> bool:
        """Other creditors' copies become the truth for all who used the span."""
        if not self.is_used(span):
            return False
        for sequence in sequences:
            if span in sequence.table.remote:
                sequence.table.lend_on(span, by)
        self._remote.lend_on(span, by)
        self._released.append(span)
        return True

    def expire_remote(self, now_s: float) -> None:
        self._released += self._remote.expire(now_s)

    def drop_idle_remote(self) -> None:
        """Give back what creditors hold for nobody: memory is short."""
        self._released += self._remote.drop_idle()

    # -- losing -----------------------------------------------------------------------------------

    def lose(
        self,
        sequences: Iterable[Sequence],
        is_lost: Callable[[RemoteSpan], bool],
    ) -> int:
        """These parts are holes of their sequences from now on.

        Returns how many of the sequences have lost something.
        """
        spans = self._remote.lose(is_lost)
        # Told all the same: it may be slow or cut off, not gone.
        self._released += spans
        gone = {span.move_id for span in spans}
        num_hurt = 0
        for sequence in sequences:
            size = sequence.table.block_size
            lost = sequence.table.lose(gone)
            for blocks in lost:
                sequence.lose(range(blocks.start * size, blocks.stop * size))
            num_hurt += bool(lost)
        return num_hurt

    def find_lost(self, sequence: Sequence) -> BlockHash | None:
        """Fill holes with cached blocks: left from before they moved, or computed by others.

        Returns what the next hole begins with, if others that lost it can use it once it is there.
        """
        self._find_again(sequence)
        if not self._is_caching or not sequence.holes:
            return None
        return sequence.hashes[sequence.holes[0].start // sequence.table.block_size]

    def _find_again(self, sequence: Sequence) -> None:
        size = sequence.table.block_size
        while self._is_caching and sequence.holes:
            hole = sequence.holes[0]
            absent = sequence.table.absent
            if hole.start != absent.start * size:
                return  # its next block is here, but not computed to its end
            blocks = slice(absent.start, min(absent.stop, hole.stop // size))
            found = self.pool.reuse(sequence.hashes[blocks])
            if not found:
                return
            sequence.table.grow(found)
            sequence.advance(len(found) * size)

    def _adopt(self, sequence: Sequence) -> bool:
        """Let go of local blocks that lie on a creditor already; False if there are none."""
        if not self._is_caching:
            return False
        movable = sequence.movable_blocks
        first = movable.start
        spans = self._remote.find(sequence.hashes[first : movable.stop])
        self._remote.hold(spans)
        for span in spans:
            self.pool.free(sequence.table.commit_move(first, span))
            first += span.num_blocks
        return bool(spans)
