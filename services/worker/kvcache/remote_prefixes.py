"""Spans on creditors that several sequences may use: shared, kept for a while, given back. Pure.

A prefix that was lent out stays where it is: the next sequence that begins with the same tokens
reads it in place. A span that no sequence uses is kept for a bounded time, since it occupies
somebody else's memory. Owned by `engine.sequence_blocks`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from services.common.ids import MoveId
from services.worker.kvcache.block_hash import BlockHash
from services.worker.kvcache.block_table import RemoteSpan


@dataclass(slots=True, eq=False)
class _Kept:
    span: RemoteSpan
    hashes: tuple[BlockHash, ...]
    num_holders: int = 1
    idle_since_s: float = 0.0

    @property
    def first(self) -> BlockHash:
        """A hash covers all that precedes its block, so the first one places the whole span."""
        return self.hashes[0]


class RemotePrefixes:
    """Every span that this instance has on creditors, with the sequences that hold it counted."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: how long a span without holders stays; 0 gives it back at once."""
        self._keep_s = keep_s
        self._by_move: dict[MoveId, _Kept] = {}
        self._by_first: dict[BlockHash, _Kept] = {}

    @property
    def spans(self) -> list[RemoteSpan]:
        return [kept.span for kept in self._by_move.values()]

    def add(self, span: RemoteSpan, hashes: Sequence[BlockHash]) -> None:
        """A move was committed: its sequence is the first holder. The first of equals is found."""
        kept = self._by_move[span.move_id] = _Kept(span, tuple(hashes))
        self._by_first.setdefault(kept.first, kept)

    def find(self, hashes: Sequence[BlockHash]) -> list[RemoteSpan]:
        """The chain of spans that holds the beginning of `hashes`; maybe none."""
        found: list[RemoteSpan] = []
        start = 0
        while start < len(hashes):
            kept = self._by_first.get(hashes[start])
            if kept is None or tuple(hashes[start : start + len(kept.hashes)]) != kept.hashes:
                break
            found.append(kept.span)
            start += len(kept.hashes)
        return found

    def hold(self, spans: Sequence[RemoteSpan]) -> None:
        for span in spans:
            self._by_move[span.move_id].num_holders += 1

    def let_go(self, spans: Sequence[RemoteSpan], now_s: float) -> list[RemoteSpan]:
        """Sequences stopped using these; returns those to give back to their creditors now."""
        for span in spans:
            kept = self._by_move[span.move_id]
            kept.num_holders -= 1
            kept.idle_since_s = now_s
        return self.expire(now_s)

    def expire(self, now_s: float) -> list[RemoteSpan]:
        return self._forget_idle(lambda kept: now_s - kept.idle_since_s >= self._keep_s)

    def drop_idle(self) -> list[RemoteSpan]:
        """Memory is short somewhere: give back whatever nobody uses."""
        return self._forget_idle(lambda _: True)

    def is_held(self, span: RemoteSpan) -> bool:
        kept = self._by_move.get(span.move_id)
        return kept is not None and kept.num_holders > 0

    def give_back(self, move_ids: Collection[MoveId]) -> list[RemoteSpan]:
        """The creditor wants these: returns those that nobody holds, which end here."""
        return self._forget_idle(lambda k: k.span.move_id in move_ids)

    def take_back(self, span: RemoteSpan) -> tuple[BlockHash, ...]:
        """Its holders have it in local blocks now; returns how those are found again."""
        kept = self._by_move.pop(span.move_id)
        self._hide(kept)
        return kept.hashes

    def lend_on(self, span: RemoteSpan, by: Sequence[RemoteSpan]) -> None:
        """Other creditors hold the same for the same sequences."""
        kept = self._by_move.pop(span.move_id)
        self._hide(kept)
        hashes = iter(kept.hashes)
        for part in by:
            own = tuple(islice(hashes, part.num_blocks))
            moved = self._by_move[part.move_id] = replace(kept, span=part, hashes=own)
            self._by_first.setdefault(moved.first, moved)

    def lose(self, is_lost: Callable[[RemoteSpan], bool]) -> list[RemoteSpan]:
        """What lay there is forgotten; whoever holds it has lost it."""
        return self._forget(kept for kept in self._by_move.values() if is_lost(kept.span))

    def _forget_idle(self, is_due: Callable[[_Kept], bool]) -> list[RemoteSpan]:
        return self._forget(k for k in self._by_move.values() if k.num_holders == 0 and is_due(k))

    def _forget(self, those: Iterable[_Kept]) -> list[RemoteSpan]:
        due = list(those)
        for kept in due:
            del self._by_move[kept.span.move_id]
            self._hide(kept)
        return [kept.span for kept in due]

    def _hide(self, kept: _Kept) -> None:
        """Not found any more; an equal span takes its place if there is one."""
        if self._by_first.get(kept.first) is not kept:
            return
        del self._by_first[kept.first]
        for other in self._by_move.values():
            if other.first == kept.first and other is not kept:
                self._by_first[kept.first] = other
                return
