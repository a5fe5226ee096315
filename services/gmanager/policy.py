"""Algorithm 1 of the paper: pairs debtors with creditors, greedily by modelled throughput.

Pure and deterministic; called by `planner` every planning period. The numbers beside the code are
the lines of the algorithm as design 2.2 gives it. Every debtor gets a decision, also where nothing
moves: `audit` keeps them.
"""

from collections.abc import Collection, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

import numpy as np

from services.common.ids import InstId, ReqId
from services.gmanager.board import Board, Move, Rules
from services.gmanager.cluster import PlacementEntry, PlacementView
from services.gmanager.perf_model import OperatingPoint


class Verdict(StrEnum):
    """Why blocks of a debtor are moved, or are not."""

    MOVE = "more throughput"
    RESTING = "moved recently"
    LENDS = "takes blocks in"
    NOTHING_TO_MOVE = "no request has a full block here"
    NO_CREDITOR = "nobody has room"
    TOO_LITTLE_ROOM = "no room for a whole request"
    NO_GAIN = "no more throughput"


@dataclass(frozen=True, slots=True)
class Change:
    """One instance before and after the moves of a decision."""

    inst_id: InstId
    before: OperatingPoint
    after: OperatingPoint

    @property
    def gain_tokens_per_s(self) -> float:
        return self.after.tokens_per_s - self.before.tokens_per_s


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about one debtor. The moves were only weighed unless the verdict is MOVE."""

    debtor: InstId
    verdict: Verdict
    req_id: ReqId | None = None
    moves: tuple[Move, ...] = ()
    #: The debtor, and every creditor of `moves`.
    changes: tuple[Change, ...] = ()

    @property
    def gain_tokens_per_s(self) -> float:
        return sum(change.gain_tokens_per_s for change in self.changes)


def plan(
    view: PlacementView,
    rules: Rules,
    under_way: Collection[Move] = (),
    resting: Set[InstId] = frozenset(),
) -> list[Decision]:
    """`resting`: owners that are left alone, since what they report is about to change."""
    board = Board(view, rules, under_way)
    decisions: list[Decision] = []
    for debtor in board.debtors():  # 1, 3
        decision = _decide(board, debtor, debtor in resting)
        if decision.verdict is Verdict.MOVE:
            for move, change in zip(decision.moves, decision.changes[1:], strict=True):
                board.commit(move, change.after)  # 8
        decisions.append(decision)
    return decisions


def _decide(board: Board, debtor: InstId, is_resting: bool) -> Decision:
    if is_resting:
        return Decision(debtor, Verdict.RESTING)
    if board.is_lending(debtor):
        return Decision(debtor, Verdict.LENDS)
    request = board.longest_request(debtor)  # 4
    if request is None or request.num_blocks == 1:
        return Decision(debtor, Verdict.NOTHING_TO_MOVE)
    search = _Search(board, request)
    for creditor in islice(board.creditors(debtor), board.rules.max_moves_per_source):  # 2, 5
        if not search.lend_to(creditor):
            break
    return search.decision()


class _Search:
    """The moves of one debtor, creditor after creditor."""

    def __init__(self, board: Board, request: PlacementEntry) -> None:
        self._board = board
        self._request = request
        self._debtor = board.points[request.owner_inst_id]
        self._num_left = request.num_blocks - 1  # block_max: the tail block still grows
        self._weighed: list[tuple[Move, Change]] = []
        #: The debtor with the first `_num_good` of these moves, which are worth it.
        self._good_debtor = self._debtor
        self._num_good = 0
        self._verdict = Verdict.NO_CREDITOR

    def lend_to(self, creditor: InstId) -> bool:
        """Finds the best move there; False where no other creditor need be asked."""
        request, lender = self._request, self._board.points[creditor]
        link_s = self._board.added_link_s(request, creditor)
        most = min(self._num_left, self._board.room(creditor))
        num_blocks = best_num_blocks(self._debtor, lender, link_s, most)  # 6
        if not num_blocks:
            return False
        move = Move(request.req_id, num_blocks, request.owner_inst_id, creditor)
        self._weighed.append((move, Change(creditor, lender, lender.take_in(num_blocks))))
        self._debtor = self._debtor.lend_out(num_blocks, link_s)
        self._num_left -= num_blocks
        if self._debtor.admitted == self._good_debtor.admitted:
            self._verdict = Verdict.TOO_LITTLE_ROOM
            return True  # room for a part of a request: of use if the next creditor adds the rest
        if self._is_noise():  # 7
            self._verdict = Verdict.NO_GAIN
            return False
        self._good_debtor, self._num_good = self._debtor, len(self._weighed)
        return True

    def decision(self) -> Decision:
        if self._num_good:
            return self._decision(Verdict.MOVE, self._weighed[: self._num_good], self._good_debtor)
        return self._decision(self._verdict, self._weighed, self._debtor)

    def _is_noise(self) -> bool:
        """A gain below `min_gain` of those who take part is noise, and a copy is not free."""
        changes = [change for _, change in self._weighed[self._num_good :]]
        changes.append(Change(self._request.owner_inst_id, self._good_debtor, self._debtor))
        before = sum(change.before.tokens_per_s for change in changes)
        gain = sum(change.gain_tokens_per_s for change in changes)
        return gain <= self._board.rules.min_gain * before

    def _decision(
        self, verdict: Verdict, weighed: list[tuple[Move, Change]], debtor: OperatingPoint
    ) -> Decision:
        inst_id = self._request.owner_inst_id
        own = Change(inst_id, self._board.points[inst_id], debtor)
        moves = tuple(move for move, _ in weighed)
        changes = (own, *(change for _, change in weighed))
        return Decision(inst_id, verdict, self._request.req_id, moves, changes)


def best_num_blocks(
    debtor: OperatingPoint, creditor: OperatingPoint, link_s: float, most: int
) -> int:
    """The k from 1 to `most` with the highest throughput of both together, or 0 for none.

    Only the fewest blocks that let 1, 2, 3 ... more waiting requests in come into question: between
    two of them the batch does not grow, so that a copy would be for nothing. Where not even one
    fits, all that can move: the next creditor may bring the rest.
    """
    first = debtor.admitted + 1
    if most <= 0 or first > debtor.waiting:
        return 0
    to_admit = np.asarray(debtor.blocks_to_admit[first:], dtype=np.int64) - debtor.free_blocks
    counts = to_admit[: np.searchsorted(to_admit, most, "right")]
    if not len(counts):
        return most
    lent = debtor.lend_out(0, link_s).tokens_per_s_lending(counts)
    together = lent + creditor.tokens_per_s_lending(-counts)
    # Of equals the most blocks: they let the most in.
    return int(counts[len(counts) - 1 - np.argmax(together[::-1])])
