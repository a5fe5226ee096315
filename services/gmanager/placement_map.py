"""The Request Placement Map: which instance holds how many blocks of which request (design 2.3).

Pure: the time is an argument, and every change answers with the keys it touched, for whoever
persists them. Called by `keeper` alone.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from services.common.errors import InvalidRequest
from services.common.ids import Incarnation, InstId, ReqId
from services.gmanager.cluster import (
    Cluster,
    Heartbeat,
    Instance,
    InstanceInfo,
    InstanceLoad,
    PlacementEntry,
    PlacementView,
    RowKey,
)


@dataclass(frozen=True, slots=True)
class Delta:
    """Keys whose value changed; a key that the map no longer has was removed."""

    instances: frozenset[InstId] = frozenset()
    rows: frozenset[RowKey] = frozenset()


@dataclass(frozen=True, slots=True)
class HeartbeatOutcome:
    register_again: bool
    full_report: bool
    delta: Delta


class PlacementMap:
    def __init__(self) -> None:
        self._instances: dict[InstId, Instance] = {}
        # Every instance here has its dictionary there, empty or not.
        self._rows: dict[InstId, dict[ReqId, PlacementEntry]] = {}
        # Of the rows those that lend; few, so that a plan need not look through all.
        self._lent: dict[RowKey, PlacementEntry] = {}

    def restore(self, cluster: Cluster, now_s: float) -> None:
        """Begins anew with what another process knew. Each instance must confirm it in full."""
        self._instances.clear()
        self._rows.clear()
        self._lent.clear()
        for instance in cluster.instances:
            self._instances[instance.inst_id] = Instance(instance.info, instance.load, now_s)
            self._rows[instance.inst_id] = {}
        for entry in cluster.entries:
            if entry.inst_id in self._rows:
                self._put(entry)

    def register(self, info: InstanceInfo, now_s: float) -> Delta:
        """A new incarnation replaces the old one with all its rows; the same one keeps them."""
        known = self._instances.get(info.inst_id)
        is_same = known is not None and known.info.incarnation == info.incarnation
        load = known.load if known is not None and is_same else InstanceLoad()
        dropped = frozenset() if is_same else self._drop_rows(info.inst_id)
        self._instances[info.inst_id] = Instance(info, load, now_s)
        self._rows.setdefault(info.inst_id, {})
        return Delta(frozenset({info.inst_id}), dropped)

    def apply_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> HeartbeatOutcome:
        known = self._instances.get(heartbeat.inst_id)
        if known is None or known.info.incarnation != heartbeat.incarnation:
            return HeartbeatOutcome(register_again=True, full_report=True, delta=Delta())
        _check(heartbeat, known.info)
        last = known.last_sequence
        if last is not None and heartbeat.sequence_number <= last:
            # Overtaken on the way: it proves life, and everything else in it is old.
            self._instances[known.inst_id] = replace(known, last_heartbeat_s=now_s)
            return HeartbeatOutcome(False, known.needs_full_report, Delta())
        # After a gap the entries are true still, but others are missing.
        has_gap = last is None or heartbeat.sequence_number != last + 1
        needs_full_report = not heartbeat.full and (has_gap or known.needs_full_report)
        perf = heartbeat.perf
        instance = Instance(
            info=known.info if perf is None else replace(known.info, perf=perf),
            load=heartbeat.load or known.load,
            last_heartbeat_s=now_s,
            last_sequence=heartbeat.sequence_number,
            needs_full_report=needs_full_report,
        )
        self._instances[known.inst_id] = instance
        is_same = instance.load == known.load and instance.info is known.info
        changed = frozenset() if is_same else frozenset({known.inst_id})
        delta = Delta(changed, self._apply_entries(heartbeat))
        return HeartbeatOutcome(False, needs_full_report, delta)

    def deregister(self, inst_id: InstId, incarnation: Incarnation) -> Delta:
        """Idempotent; a predecessor that leaves late does not take its successor along."""
        known = self._instances.get(inst_id)
        if known is None or known.info.incarnation != incarnation:
            return Delta()
        return self._drop(inst_id)

    def expire(self, now_s: float, timeout_s: float) -> Delta:
        """Drops every instance that was silent for longer than the timeout."""
        silent = [
            instance.inst_id
            for instance in self._instances.values()
            if now_s - instance.last_heartbeat_s > timeout_s
        ]
        deltas = [self._drop(inst_id) for inst_id in silent]
        return Delta(frozenset(silent), frozenset(key for delta in deltas for key in delta.rows))

    def instance(self, inst_id: InstId) -> Instance | None:
        return self._instances.get(inst_id)

    def row(self, key: RowKey) -> PlacementEntry | None:
        return self._rows.get(key.inst_id, {}).get(key.req_id)

    def rows_of(self, inst_id: InstId) -> Collection[PlacementEntry]:
        return self._rows.get(inst_id, {}).values()

    def instances(self) -> tuple[Instance, ...]:
        return tuple(self._instances[inst_id] for inst_id in sorted(self._instances))

    def cluster(self) -> Cluster:
        rows = (row for rows in self._rows.values() for row in rows.values())
        return Cluster(self.instances(), tuple(sorted(rows, key=lambda row: row.key)))

    def snapshot(self) -> PlacementView:
        """As it is now, for another thread. Rows are values: only what holds them is copied."""
        rows = {inst_id: rows.copy() for inst_id, rows in self._rows.items()}
        return PlacementView(self.instances(), rows, tuple(self._lent.values()))

    def _apply_entries(self, heartbeat: Heartbeat) -> frozenset[RowKey]:
        rows = self._rows[heartbeat.inst_id]
        entries: Iterable[PlacementEntry] = heartbeat.entries
        if heartbeat.full:
            reported = {entry.req_id for entry in entries}
            gone = [replace(rows[r], num_blocks=0) for r in rows if r not in reported]
            entries = (*gone, *entries)
        return frozenset(entry.key for entry in entries if self._put(entry))

    def _put(self, entry: PlacementEntry) -> bool:
        """Stores or, at zero blocks, removes the row; False where that changes nothing."""
        rows, key = self._rows[entry.inst_id], entry.key
        if rows.get(entry.req_id) == entry:
            return False
        self._lent.pop(key, None)
        if entry.num_blocks == 0:
            return rows.pop(entry.req_id, None) is not None
        rows[entry.req_id] = entry
        if not entry.local:
            self._lent[key] = entry
        return True

    def _drop(self, inst_id: InstId) -> Delta:
        rows = self._drop_rows(inst_id)
        del self._instances[inst_id], self._rows[inst_id]
        return Delta(frozenset({inst_id}), rows)

    def _drop_rows(self, inst_id: InstId) -> frozenset[RowKey]:
        rows = self._rows.get(inst_id, {})
        keys = frozenset(row.key for row in rows.values())
        rows.clear()
        for key in keys & self._lent.keys():
            del self._lent[key]
        return keys


def _check(heartbeat: Heartbeat, info: InstanceInfo) -> None:
    if heartbeat.load is not None and heartbeat.load.free_blocks > info.num_blocks:
        raise InvalidRequest(
            f"instance {info.inst_id} reports more free blocks than it has", "load"
        )
    for entry in heartbeat.entries:
        if entry.inst_id != heartbeat.inst_id:
            raise InvalidRequest(
                f"instance {heartbeat.inst_id} reports a row of instance {entry.inst_id}", "entries"
            )
        if entry.num_blocks and entry.local != (entry.owner_inst_id == entry.inst_id):
            raise InvalidRequest(
                f"request {entry.req_id}: local contradicts owner {entry.owner_inst_id}", "entries"
            )
