"""Algorithm 1 of the paper: pairs debtors with creditors, greedily by modelled throughput.

Pure and deterministic; called by `planner` every planning period. The numbers beside the code are
the lines of the algorithm as design 2.2 gives it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from services.common.ids import InstId, ReqId
from services.gmanager.cluster import Cluster, PlacementEntry
from services.gmanager.perf_model import OperatingPoint, operating_point

#: A gain below this share of the pair's throughput is noise, and a copy is not free.
MIN_GAIN = 0.01
#: Candidates evaluated per pair; beyond, they are thinned out evenly.
MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Thresholds:
    batch: int  # beta_thres
    utilisation: float  # U_thres


@dataclass(frozen=True, slots=True)
class Move:
    req_id: ReqId
    num_blocks: int
    source: InstId
    destination: InstId


def plan_moves(
    cluster: Cluster, thresholds: Thresholds, busy: Set[ReqId] = frozenset()
) -> list[Move]:
    """Owners of busy requests are left alone: what they report is about to change."""
    board = _Board(cluster, thresholds, busy)
    points, moves = board.points, list[Move]()
    for debtor in board.debtors():  # 1, 3
        request = board.longest_request(debtor)  # 4
        if request is None or any(move.destination == debtor for move in moves):
            continue
        block_max = request.num_blocks - 1  # the tail block still grows
        trial, pending = dict(points), list[Move]()
        for creditor in board.creditors(debtor, points, moves):  # 2, 5
            pair = _Pair(trial[debtor], trial[creditor], *board.new_links(request, creditor))
            candidates = pair.candidates(min(block_max, board.room(creditor, points)))
            num_blocks = max(candidates, key=pair.tokens_per_s, default=0)  # 6
            if not num_blocks:
                break
            trial[debtor], trial[creditor] = pair.after(num_blocks)
            pending.append(Move(request.req_id, num_blocks, debtor, creditor))
            block_max -= num_blocks
            if trial[debtor].admitted == points[debtor].admitted:
                continue  # room for a part of a request: of use if the next creditor adds the rest
            if _gain(points, trial, pending) <= 0:  # 7
                break
            points, moves, pending = dict(trial), moves + pending, []  # 8
    return moves


def _gain(
    before: dict[InstId, OperatingPoint], after: dict[InstId, OperatingPoint], moves: list[Move]
) -> float:
    """Tokens per second that the moves bring to those who take part, beyond noise."""
    touched = {move.source for move in moves} | {move.destination for move in moves}
    before_tps = sum(before[inst_id].tokens_per_s for inst_id in touched)
    return sum(after[inst_id].tokens_per_s for inst_id in touched) - (1 + MIN_GAIN) * before_tps


@dataclass(frozen=True, slots=True)
class _Pair:
    """One debtor and one creditor: what moving k blocks between them does."""

    debtor: OperatingPoint
    creditor: OperatingPoint
    new_creditors: int
    new_rows: int

    def candidates(self, most: int) -> list[int]:
        """The fewest blocks that let 1, 2, 3 ... more waiting requests in.

        Between two of them the batch does not grow, so that a copy would be for nothing. Where not
        even one fits, all that can move: the next creditor may bring the rest.
        """
        debtor = self.debtor
        first = debtor.admitted + 1
        if most <= 0 or first > debtor.waiting:
            return []
        last = replace(debtor, free_blocks=debtor.free_blocks + most).admitted
        stride = max(1, math.ceil((last - first + 1) / MAX_CANDIDATES))
        counts = range(last, first - 1, -stride)
        return [debtor.blocks_to_admit(n) - debtor.free_blocks for n in counts] or [most]

    def after(self, num_blocks: int) -> tuple[OperatingPoint, OperatingPoint]:
        lent = self.debtor.lend_out(num_blocks, self.new_creditors, self.new_rows)
        return lent, self.creditor.take_in(num_blocks)

    def tokens_per_s(self, num_blocks: int) -> float:
        debtor, creditor = self.after(num_blocks)
        return debtor.tokens_per_s + creditor.tokens_per_s


class _Board:
    """The cluster indexed for one plan."""

    def __init__(self, cluster: Cluster, thresholds: Thresholds, busy: Set[ReqId]) -> None:
        self._thresholds = thresholds
        self._instances = {
            instance.inst_id: instance
            for instance in cluster.instances
            if instance.info.perf.non_attention and not instance.load.draining
        }
        self._lent = [entry for entry in cluster.entries if not entry.local]
        self._holders = {entry.key for entry in self._lent}
        self._loans = {(entry.owner_inst_id, entry.inst_id) for entry in self._lent}
        self._busy_owners = {e.owner_inst_id for e in cluster.entries if e.req_id in busy}
        self._longest: dict[InstId, PlacementEntry] = {}
        for entry in cluster.entries:
            longest = self._longest.get(entry.inst_id)
            if entry.local and (longest is None or entry.num_blocks > longest.num_blocks):
                self._longest[entry.inst_id] = entry
        self.points = self._operating_points()

    def _operating_points(self) -> dict[InstId, OperatingPoint]:
        num_creditors = Counter(owner for owner, _ in self._loans)
        num_rows = Counter(entry.owner_inst_id for entry in self._lent)
        return {
            inst_id: operating_point(instance, num_creditors[inst_id], num_rows[inst_id])
            for inst_id, instance in self._instances.items()
        }

    def debtors(self) -> list[InstId]:
        """Small batches that only memory keeps from growing, the smallest first."""
        held_down = [
            inst_id
            for inst_id, point in self.points.items()
            if point.running <= self._thresholds.batch
            and point.admitted < point.waiting
            and inst_id not in self._busy_owners
        ]
        return sorted(held_down, key=lambda inst_id: (self.points[inst_id].running, inst_id))

    def longest_request(self, debtor: InstId) -> PlacementEntry | None:
        return self._longest.get(debtor)

    def creditors(
        self, debtor: InstId, points: dict[InstId, OperatingPoint], moves: list[Move]
    ) -> Iterator[InstId]:
        """Who may lend to this debtor, the emptiest first, as the plan so far leaves them.

        Two instances never lend to each other, nor does one lend and borrow in one plan.
        """
        sources = {move.source for move in moves}
        free_share = {
            inst_id: points[inst_id].free_blocks / instance.info.num_blocks
            for inst_id, instance in self._instances.items()
        }
        for inst_id in sorted(free_share, key=lambda inst_id: (-free_share[inst_id], inst_id)):
            if (
                inst_id != debtor
                and inst_id not in sources
                and (inst_id, debtor) not in self._loans
                and self.room(inst_id, points) > 0
                and self._can_hold(inst_id, debtor)
            ):
                yield inst_id

    def room(self, creditor: InstId, points: dict[InstId, OperatingPoint]) -> int:
        """Lending takes nobody beyond U_thres: the rest is for the creditor's own growth."""
        num_blocks = self._instances[creditor].info.num_blocks
        reserve = math.ceil((1 - self._thresholds.utilisation) * num_blocks)
        return points[creditor].free_blocks - reserve

    def new_links(self, request: PlacementEntry, creditor: InstId) -> tuple[int, int]:
        """Calls per layer and query rows that the move adds to the debtor's step."""
        is_new_creditor = (request.owner_inst_id, creditor) not in self._loans
        is_new_row = (request.req_id, creditor) not in self._holders
        return int(is_new_creditor), int(is_new_row)

    def _can_hold(self, creditor: InstId, debtor: InstId) -> bool:
        return self._instances[creditor].info.can_hold_blocks_of(self._instances[debtor].info)
