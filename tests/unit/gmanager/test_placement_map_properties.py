"""Any order of reports, losses, restarts and silence leaves the map true and its deltas complete.

Each worker here is a dictionary that reports as real ones do: changes only, everything when asked.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.common.ids import Incarnation, InstId
from services.gmanager.cluster import Instance, InstanceLoad, PlacementEntry, RowKey
from services.gmanager.placement_map import Delta, PlacementMap
from tests.unit.gmanager.builders import make_heartbeat, make_info, make_row

TIMEOUT_S = 3.0
INST_IDS = st.sampled_from([1, 2])


@dataclass
class FakeWorker:
    inst_id: int
    incarnation: int = 1
    sequence_number: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    unreported: set[int] = field(default_factory=set)
    must_report_all: bool = True

    def rows(self) -> list[PlacementEntry]:
        return [self.row(req_id) for req_id in sorted(self.blocks)]

    def changes(self) -> list[PlacementEntry]:
        return [self.row(req_id) for req_id in sorted(self.unreported)]

    def row(self, req_id: int) -> PlacementEntry:
        """Odd requests belong to instance 1: the other one lends."""
        return make_row(req_id, self.inst_id, self.blocks.get(req_id, 0), owner=2 - req_id % 2)


class MapMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.map = PlacementMap()
        self.workers = {inst_id: FakeWorker(inst_id) for inst_id in (1, 2)}
        self.persisted_instances: dict[InstId, tuple[Incarnation, InstanceLoad]] = {}
        self.persisted_rows: dict[RowKey, PlacementEntry] = {}

    def persist(self, delta: Delta) -> None:
        for inst_id in delta.instances:
            instance = self.map.instance(inst_id)
            if instance is None:
                del self.persisted_instances[inst_id]
            else:
                self.persisted_instances[inst_id] = self.essence(instance)
        for key in delta.rows:
            row = self.map.row(key)
            if row is None:
                del self.persisted_rows[key]
            else:
                self.persisted_rows[key] = row

    @staticmethod
    def essence(instance: Instance) -> tuple[Incarnation, InstanceLoad]:
        return instance.info.incarnation, instance.load

    @rule(inst_id=INST_IDS, req_id=st.integers(1, 4), num_blocks=st.integers(0, 3))
    def change_blocks(self, inst_id: int, req_id: int, num_blocks: int) -> None:
        worker = self.workers[inst_id]
        worker.unreported.add(req_id)
        worker.blocks[req_id] = num_blocks
        if not num_blocks:
            del worker.blocks[req_id]

    @rule(inst_id=INST_IDS, is_lost=st.booleans(), free_blocks=st.integers(0, 100))
    def heartbeat(self, inst_id: int, is_lost: bool, free_blocks: int) -> None:
        worker = self.workers[inst_id]
        worker.sequence_number += 1
        full = worker.must_report_all
        report = make_heartbeat(
            inst_id,
            worker.sequence_number,
            *(worker.rows() if full else worker.changes()),
            incarnation=worker.incarnation,
            full=full,
            load=InstanceLoad(free_blocks=free_blocks),
        )
        worker.unreported.clear()
        if is_lost:
            return
        outcome = self.map.apply_heartbeat(report, self.now_s)
        self.persist(outcome.delta)
        worker.must_report_all = outcome.full_report
        if outcome.register_again:
            info = make_info(inst_id, incarnation=worker.incarnation)
            self.persist(self.map.register(info, self.now_s))
        elif not outcome.full_report:
            rows = [row for row in self.map.cluster().entries if row.inst_id == inst_id]
            assert rows == worker.rows()

    @rule(inst_id=INST_IDS)
    def restart_worker(self, inst_id: int) -> None:
        self.workers[inst_id] = FakeWorker(inst_id, self.workers[inst_id].incarnation + 1)

    @rule(inst_id=INST_IDS)
    def stop_worker(self, inst_id: int) -> None:
        incarnation = Incarnation(self.workers[inst_id].incarnation)
        self.persist(self.map.deregister(InstId(inst_id), incarnation))

    @rule()
    def restart_gmanager(self) -> None:
        restored = PlacementMap()
        restored.restore(self.map.cluster(), self.now_s)
        self.map = restored

    @rule(wait_s=st.floats(0.0, 5.0))
    def wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.persist(self.map.expire(self.now_s, TIMEOUT_S))
        ages_s = [self.now_s - instance.last_heartbeat_s for instance in self.map.instances()]
        assert all(age_s <= TIMEOUT_S for age_s in ages_s)

    @invariant()
    def deltas_are_complete(self) -> None:
        cluster = self.map.cluster()
        instances = {instance.inst_id: self.essence(instance) for instance in cluster.instances}
        assert instances == self.persisted_instances
        assert {entry.key: entry for entry in cluster.entries} == self.persisted_rows

    @invariant()
    def what_is_lent_is_known_without_looking_through_all_rows(self) -> None:
        rows = [row for rows in self.map.snapshot().rows.values() for row in rows.values()]
        assert sorted(self.map.snapshot().lent, key=lambda row: row.key) == sorted(
            (row for row in rows if not row.local), key=lambda row: row.key
        )

    @invariant()
    def rows_belong_to_live_instances_and_are_never_empty(self) -> None:
        cluster = self.map.cluster()
        live = {instance.inst_id for instance in cluster.instances}
        assert all(entry.inst_id in live and entry.num_blocks > 0 for entry in cluster.entries)


TestPlacementMap = MapMachine.TestCase
TestPlacementMap.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
