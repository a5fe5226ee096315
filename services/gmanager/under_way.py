"""Moves that were ordered: which the map does not show yet, and who rests after one.

Pure; used by `planner`, which tells it the time and what the map says.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.common.ids import InstId
from services.gmanager.board import Move
from services.gmanager.cluster import RowKey


@dataclass(slots=True)
class _Ordered:
    ordered_s: float
    #: Of the request at the destination, before the move.
    held_blocks: int
    is_under_way: bool = True


class UnderWay:
    def __init__(self, cool_down_s: float) -> None:
        """A source is left alone for so long after a move, whatever the answer was: an accepted one
        needs the time to show in heartbeats, and a refused one would be refused again at once.
        """
        self._cool_down_s = cool_down_s
        self._ordered: dict[Move, _Ordered] = {}

    def add(self, move: Move, held_blocks: int, now_s: float) -> None:
        self._ordered[move] = _Ordered(now_s, held_blocks)

    def end(self, move: Move) -> None:
        """It will bring nothing; its source still rests."""
        if move in self._ordered:
            self._ordered[move].is_under_way = False

    def refresh(self, held_blocks: Callable[[RowKey], int], now_s: float) -> None:
        """Forgets what is long ago, and takes what the map shows for arrived."""
        self._ordered = {
            move: ordered
            for move, ordered in self._ordered.items()
            if now_s < ordered.ordered_s + self._cool_down_s
        }
        for move, ordered in self._ordered.items():
            if held_blocks(RowKey(move.req_id, move.destination)) != ordered.held_blocks:
                ordered.is_under_way = False

    @property
    def moves(self) -> list[Move]:
        return [move for move, ordered in self._ordered.items() if ordered.is_under_way]

    @property
    def resting(self) -> set[InstId]:
        return {move.source for move in self._ordered}
