"""Spans on creditors that several sequences may use: shared, kept for a while, given back. Pure.

A prefix that was lent out stays where it is: the next sequence that begins with the same tokens
reads it in place. A span that no sequence uses is kept for a bounded time, since it occupies
somebody else's memory. Owned by the scheduler.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common.ids import InstId, MoveId
from services.worker.kvcache.block_hash import BlockHash
from services.worker.kvcache.block_table import RemoteSpan


@dataclass(slots=True, eq=False)
class _Kept:
    span: RemoteSpan
    previous: BlockHash
    hashes: tuple[BlockHash, ...]
    num_holders: int = 1
    idle_since_s: float = 0.0


class RemotePrefixes:
    """Every span that this instance has on creditors, with the sequences that hold it counted."""

    def __init__(self, keep_s: float) -> None:
        """`keep_s`: how long a span without holders stays; 0 gives it back at once."""
        self._keep_s = keep_s
        self._by_move: dict[MoveId, _Kept] = {}
        self._by_previous: dict[BlockHash, _Kept] = {}

    @property
    def spans(self) -> list[RemoteSpan]:
        return [kept.span for kept in self._by_move.values()]

    def add(self, span: RemoteSpan, previous: BlockHash, hashes: Sequence[BlockHash]) -> None:
        """A move was committed: its sequence is the first holder. The first of equals is found."""
        kept = self._by_move[span.move_id] = _Kept(span, previous, tuple(hashes))
        self._by_previous.setdefault(previous, kept)

    def find(self, root: BlockHash, hashes: Sequence[BlockHash]) -> list[RemoteSpan]:
        """The chain of spans that holds the beginning of `hashes`; maybe none."""
        found: list[RemoteSpan] = []
        previous, start = root, 0
        while (kept := self._by_previous.get(previous)) is not None:
            end = start + len(kept.hashes)
            if tuple(hashes[start:end]) != kept.hashes:
                break
            found.append(kept.span)
            previous, start = kept.hashes[-1], end
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
        return self._forget_if(lambda kept: now_s - kept.idle_since_s >= self._keep_s)

    def drop_idle(self) -> list[RemoteSpan]:
        """Memory is short somewhere: give back whatever nobody uses."""
        return self._forget_if(lambda _: True)

    def lose(self, inst_id: InstId) -> None:
        """Whatever lay there must not be found again; its holders still let go of it."""
        for kept in self._by_move.values():
            if kept.span.inst_id == inst_id:
                self._hide(kept)

    def _forget_if(self, is_due: Callable[[_Kept], bool]) -> list[RemoteSpan]:
        due = [k for k in self._by_move.values() if k.num_holders == 0 and is_due(k)]
        for kept in due:
            del self._by_move[kept.span.move_id]
            self._hide(kept)
        return [kept.span for kept in due]

    def _hide(self, kept: _Kept) -> None:
        if self._by_previous.get(kept.previous) is kept:
            del self._by_previous[kept.previous]
