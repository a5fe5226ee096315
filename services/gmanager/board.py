"""The cluster as one plan sees it and changes it move by move. Pure; used by `policy`."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from services.common.ids import InstId, ReqId
from services.gmanager.cluster import InstanceInfo, LinkTerms, PlacementEntry, PlacementView, RowKey
from services.gmanager.perf_model import OperatingPoint, operating_point
from services.gmanager.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Rules:
    """What the operator decides about plans; `config` says what each field means."""

    batch_threshold: int  # beta_thres
    utilisation_threshold: float  # U_thres
    min_gain: float = 0.01
    max_moves_per_source: int = 4
    max_moves_per_destination: int = 4
    other_node_round_trip_s: float = 0.0
    other_node_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Move:
    req_id: ReqId
    num_blocks: int
    source: InstId
    destination: InstId


class Board:
    def __init__(self, view: PlacementView, rules: Rules, under_way: Collection[Move]) -> None:
        """`under_way`: moves of earlier plans that the view does not show yet."""
        self.rules = rules
        self._instances = {
            instance.inst_id: instance
            for instance in view.instances
            if instance.info.perf.non_attention and not instance.load.draining
        }
        self._nodes = {instance.inst_id: instance.info.node for instance in view.instances}
        self._rows = view.rows
        self._loans = {(entry.owner_inst_id, entry.inst_id) for entry in view.lent}
        self._holders = {entry.key for entry in view.lent}
        self._sources: set[InstId] = set()
        self._num_moves_to = Counter[InstId]()
        self.points = self._operating_points(view.lent)
        self._ranking = Ranking()
        for inst_id in self._instances:
            self._rank(inst_id)
        for move in under_way:
            if move.source in self.points and move.destination in self.points:
                self.commit(move, self.points[move.destination].take_in(move.num_blocks))

    # -- who takes part ---------------------------------------------------------------------------

    def debtors(self) -> list[InstId]:
        """Small batches that only memory keeps from growing, the smallest first."""
        held_down = [
            inst_id
            for inst_id, point in self.points.items()
            if point.waiting
            and point.running <= self.rules.batch_threshold
            and point.admitted < point.waiting
        ]
        return sorted(held_down, key=lambda inst_id: (self.points[inst_id].running, inst_id))

    def is_lending(self, inst_id: InstId) -> bool:
        """It takes blocks in by this plan, or by moves under way."""
        return self._num_moves_to[inst_id] > 0

    def longest_request(self, debtor: InstId) -> PlacementEntry | None:
        own = (entry for entry in self._rows[debtor].values() if entry.local)
        return max(own, key=lambda entry: (entry.num_blocks, -entry.req_id), default=None)

    def creditors(self, debtor: InstId) -> Iterator[InstId]:
        """Who may lend to this debtor, nearest and emptiest first; no changes meanwhile.

        Two instances never lend to each other, nor does one lend and borrow in one plan.
        """
        for inst_id in self._ranking.best_for(self._info(debtor)):
            if inst_id != debtor and (inst_id, debtor) not in self._loans:
                yield inst_id

    def room(self, creditor: InstId) -> int:
        """Lending takes nobody beyond U_thres, where the rest is for its own growth, or its cap."""
        instance = self._instances[creditor]
        num_blocks, point = instance.info.num_blocks, self.points[creditor]
        reserve = math.ceil((1 - self.rules.utilisation_threshold) * num_blocks)
        lent = instance.load.lent_blocks + instance.load.free_blocks - point.free_blocks
        return min(point.free_blocks - reserve, instance.info.max_lent_blocks - lent)

    # -- links ------------------------------------------------------------------------------------

    def added_link_s(self, request: PlacementEntry, creditor: InstId) -> float:
        """What the move adds to a step of the owner: calls, and query rows in them."""
        is_new_creditor = (request.owner_inst_id, creditor) not in self._loans
        is_new_row = (request.req_id, creditor) not in self._holders
        link = self._link(request.owner_inst_id, creditor)
        return is_new_creditor * link.call_s + is_new_row * link.row_s

    def _operating_points(self, lent: Collection[PlacementEntry]) -> dict[InstId, OperatingPoint]:
        link_s = defaultdict[InstId, float](float)
        for owner, holder in self._loans:
            link_s[owner] += self._link(owner, holder).call_s
        for entry in lent:
            link_s[entry.owner_inst_id] += self._link(entry.owner_inst_id, entry.inst_id).row_s
        return {i: operating_point(instance, link_s[i]) for i, instance in self._instances.items()}

    def _link(self, owner: InstId, holder: InstId) -> "_Link":
        if owner not in self._instances:
            return _Link(0.0, 0.0)
        perf = self._instances[owner].info.perf
        call_s, bytes_per_s = perf.link_round_trip_s, perf.link_bytes_per_s
        way = perf.links.get(holder)
        if way is None and self._nodes[owner] != self._nodes.get(holder):
            rules = self.rules
            way = LinkTerms(rules.other_node_round_trip_s, rules.other_node_bytes_per_s)
        if way is not None:
            # What an instance measured with itself is the least, for any pair.
            call_s = max(call_s, way.round_trip_s)
            # 0 is unknown, and says nothing.
            known = [rate for rate in (bytes_per_s, way.bytes_per_s) if rate]
            bytes_per_s = min(known, default=0.0)
        row_s = perf.row_bytes / bytes_per_s if bytes_per_s else 0.0
        return _Link(perf.num_layers * call_s, perf.num_layers * row_s)

    # -- changes ----------------------------------------------------------------------------------

    def commit(self, move: Move, creditor_after: OperatingPoint) -> None:
        """What the move leaves for the debtors that come later; its source plans no more."""
        for inst_id in (move.source, move.destination):
            self._ranking.remove(self._info(inst_id), self._used_share(inst_id))
        self.points[move.destination] = creditor_after
        self._sources.add(move.source)
        self._num_moves_to[move.destination] += 1
        self._loans.add((move.source, move.destination))
        self._holders.add(RowKey(move.req_id, move.destination))
        self._rank(move.destination)

    def _rank(self, inst_id: InstId) -> None:
        is_able = self._num_moves_to[inst_id] < self.rules.max_moves_per_destination
        if is_able and inst_id not in self._sources and self.room(inst_id) > 0:
            self._ranking.add(self._info(inst_id), self._used_share(inst_id))

    def _info(self, inst_id: InstId) -> InstanceInfo:
        return self._instances[inst_id].info

    def _used_share(self, inst_id: InstId) -> float:
        return 1 - self.points[inst_id].free_blocks / self._info(inst_id).num_blocks


class _Link(NamedTuple):
    """Seconds that a step takes longer for a creditor, and for each query row there."""

    call_s: float
    row_s: float
