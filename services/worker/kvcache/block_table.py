"""Where the KV of one sequence lies: block by block here, on a creditor, or nowhere. Pure.

A block keeps its index: what moves, is lost or comes back is replaced in place, and only the end
grows, here. Called by the scheduler's books (`engine.sequence_blocks`) and read by the runner.
"""

import sys
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from services.common.ids import Incarnation, InstId, MoveId, ReqId

# In place of a block id.
_REMOTE, _HOLE = -1, -2


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Consecutive full blocks that one move put on one creditor.

    `req_id` is the request that the move was for; others with the same prefix may read it, too.
    """

    req_id: ReqId
    inst_id: InstId
    incarnation: Incarnation
    move_id: MoveId
    num_blocks: int


class Context(NamedTuple):
    """What the queries of one chunk attend to: all blocks up to the chunk's end."""

    local: Sequence[int]
    num_remote_tokens: int
    remote: Sequence[RemoteSpan]


class BlockTable:
    """Local blocks, remote spans and holes of one sequence, in its order.

    `local` and `remote` are kept beside it, because every step asks for them. The list `local` only
    ever grows at its end: where anything else changes, a new list takes its place.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.local: list[int] = []
        self.remote: list[RemoteSpan] = []
        self._starts: list[int] = []  # the first block of each span in `remote`
        self._blocks: list[int] = []
        self._num_holes = 0
        self._refresh()

    @property
    def num_blocks(self) -> int:
        """Holes included."""
        return len(self._blocks)

    @property
    def absent(self) -> range:
        """Where `grow` puts blocks: the first hole, or all that lies beyond the end."""
        if not self._num_holes:
            return range(len(self._blocks), sys.maxsize)
        first = stop = self._blocks.index(_HOLE)
        while stop < len(self._blocks) and self._blocks[stop] == _HOLE:
            stop += 1
        return range(first, stop)

    def reaches(self, num_tokens: int) -> bool:
        """Whether every one of the first `num_tokens` tokens has its place, here or elsewhere."""
        return num_tokens <= len(self._blocks) * self.block_size and not self._num_holes

    def blocks_to_reach(self, num_tokens: int) -> int:
        """How many more blocks a sequence of `num_tokens` tokens needs, those of holes included."""
        missing = -(-num_tokens // self.block_size) - len(self._blocks)
        return max(0, missing) + self._num_holes

    def slot(self, position: int) -> int:
        """The storage slot of the token at `position`; it must be local."""
        size = self.block_size
        return self.block_id(position // size) * size + position % size

    def slots(self, start: int, stop: int) -> list[int]:
        """Of the tokens at these positions; they must be local."""
        if stop == start + 1:
            return [self.slot(start)]
        size = self.block_size
        found: list[int] = []
        while start < stop:
            block_stop = min(stop, start - start % size + size)
            first = self.slot(start)
            found += range(first, first + block_stop - start)
            start = block_stop
        return found

    def block_id(self, index: int) -> int:
        """The id of the sequence's block `index`; it must be local."""
        block_id = self._blocks[index]
        if block_id < 0:
            raise IndexError(f"block {index} is not local")
        return block_id

    def local_run(self, start: int, stop: int) -> range:
        """The oldest local blocks from `start` on, and below `stop`, that follow each other."""
        if start > self._first_local:
            return self._find_run(start, stop)
        return range(self._first_local, max(self._first_local, min(stop, self._first_run_stop)))

    def context(self, num_tokens: int) -> Context:
        """What a chunk attends to that ends with the sequence's token `num_tokens`."""
        stop = -(-num_tokens // self.block_size)
        if stop >= len(self._blocks) and not self._num_holes:
            return self._whole
        blocks = self._blocks[:stop]
        if _HOLE in blocks:
            raise ValueError(f"the first {stop} blocks have a hole")
        local = [block_id for block_id in blocks if block_id >= 0]
        num_remote_tokens = (stop - len(local)) * self.block_size
        return Context(local, num_remote_tokens, self.remote[: bisect_left(self._starts, stop)])

    # -- changes ----------------------------------------------------------------------------------

    def grow(self, block_ids: Sequence[int]) -> None:
        """Put local blocks into the first hole, from its beginning, or at the end if none is."""
        if not self._num_holes:
            self._blocks.extend(block_ids)
            self.local.extend(block_ids)
            return
        hole = self.absent
        if len(block_ids) > len(hole):
            raise ValueError(f"{len(block_ids)} blocks do not fit into a hole of {len(hole)}")
        self._replace(hole.start, block_ids)

    def attach(self, spans: Sequence[RemoteSpan]) -> None:
        """Begin with what creditors hold already; the table must not have local blocks yet."""
        if self.local:
            raise ValueError("remote spans come before local blocks")
        for span in spans:
            first = len(self._blocks)
            self._blocks.extend([_REMOTE] * span.num_blocks)
            self._add(span, first)
        self._refresh()

    def commit_move(self, first: int, span: RemoteSpan) -> list[int]:
        """The local blocks from `first` on lie on the creditor now; returns their ids."""
        moved = self._blocks[first : first + span.num_blocks]
        num_local = sum(block_id >= 0 for block_id in moved)
        if num_local < span.num_blocks:
            raise ValueError(f"only {num_local} local blocks, cannot commit {span.num_blocks}")
        self._add(span, first)
        self._replace(first, [_REMOTE] * span.num_blocks)
        return moved

    def take_back(self, span: RemoteSpan, block_ids: Sequence[int]) -> None:
        """What the span held lies in these local blocks now."""
        if len(block_ids) != span.num_blocks:
            raise ValueError(f"{len(block_ids)} blocks in place of {span.num_blocks}")
        index = self.remote.index(span)
        del self.remote[index]
        self._replace(self._starts.pop(index), block_ids)

    def lend_on(self, span: RemoteSpan, by: Sequence[RemoteSpan]) -> None:
        """What the span held lies on other creditors now, in this order."""
        ends = list(accumulate(part.num_blocks for part in by))
        if ends[-1:] != [span.num_blocks]:
            raise ValueError(f"{ends[-1:]} blocks in place of {span.num_blocks}")
        index = self.remote.index(span)
        first = self._starts[index]
        self._starts[index : index + 1] = [first, *(first + end for end in ends[:-1])]
        self.remote[index : index + 1] = by

    def lose(self, move_ids: Collection[MoveId]) -> list[range]:
        """Holes are where the spans of these moves were; returns the indices of their blocks."""
        placed = list(zip(self._starts, self.remote, strict=True))
        kept = [(first, span) for first, span in placed if span.move_id not in move_ids]
        lost = [
            range(first, first + span.num_blocks)
            for first, span in placed
            if span.move_id in move_ids
        ]
        for blocks in lost:
            self._blocks[blocks.start : blocks.stop] = [_HOLE] * len(blocks)
        self._starts, self.remote = [first for first, _ in kept], [span for _, span in kept]
        self._refresh()
        return lost

    def clear(self) -> tuple[list[int], list[RemoteSpan]]:
        """Empty the table; returns what the caller must free here and release elsewhere."""
        local, remote = self.local, self.remote
        self.remote, self._starts, self._blocks = [], [], []
        self._refresh()
        return local, remote

    def _add(self, span: RemoteSpan, first: int) -> None:
        index = bisect_left(self._starts, first)
        self._starts.insert(index, first)
        self.remote.insert(index, span)

    def _replace(self, first: int, blocks: Sequence[int]) -> None:
        self._blocks[first : first + len(blocks)] = blocks
        self._refresh()

    def _refresh(self) -> None:
        """Keep what every step needs; growing at the end alone leaves it true."""
        self.local = [block_id for block_id in self._blocks if block_id >= 0]
        self._num_holes = self._blocks.count(_HOLE)
        num_remote_blocks = len(self._blocks) - len(self.local) - self._num_holes
        self._whole = Context(self.local, num_remote_blocks * self.block_size, self.remote)
        run = self._find_run(0, len(self._blocks))
        self._first_local = run.start
        is_at_end = run.stop == len(self._blocks)
        self._first_run_stop = sys.maxsize if is_at_end else run.stop

    def _find_run(self, start: int, stop: int) -> range:
        stop = min(stop, len(self._blocks))
        blocks = self._blocks
        first = next((index for index in range(start, stop) if blocks[index] >= 0), stop)
        last = next((index for index in range(first, stop) if blocks[index] < 0), stop)
        return range(first, last)
