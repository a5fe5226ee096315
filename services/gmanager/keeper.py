"""Holds the placement map of the running process: gives it the time and hands its deltas on.

The server and the planner change the map through here, so that no change misses persistence.
All of them run on one event loop; nothing here awaits, so every change is atomic.
"""

import logging
import math
from collections.abc import Callable

from services.common.ids import Incarnation, InstId
from services.gmanager.cluster import Cluster, Heartbeat, Instance, InstanceInfo, PlacementView
from services.gmanager.placement_map import Delta, HeartbeatOutcome, PlacementMap

_log = logging.getLogger(__name__)


class MapKeeper:
    def __init__(
        self,
        placement_map: PlacementMap,
        record: Callable[[Delta], None],
        clock: Callable[[], float],
        rebuild_s: float = 0.0,
    ) -> None:
        """`rebuild_s`: after so long every instance has reported to a map that began empty."""
        self._map = placement_map
        self._record = record
        self.clock = clock
        self._rebuild_s = rebuild_s
        self._whole_from_s = -math.inf

    def begin(self, cluster: Cluster) -> None:
        """Anew, with what another process knew."""
        now_s = self.clock()
        self._map.restore(cluster, now_s)
        self._whole_from_s = now_s if cluster.instances else now_s + self._rebuild_s

    @property
    def whole_in_s(self) -> float:
        """How long the map may lack instances that are there, and must not be taken for all."""
        return max(0.0, self._whole_from_s - self.clock())

    def doubt(self, reason: str) -> None:
        """Reports were missed: the instances get the time to report again."""
        self._whole_from_s = self.clock() + self._rebuild_s
        _log.warning("waiting for reports", extra={"reason": reason})

    def register(self, info: InstanceInfo) -> None:
        self._record(self._map.register(info, self.clock()))
        _log.info(
            "instance registered",
            extra={"inst_id": info.inst_id, "control_address": info.control_address},
        )

    def apply_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatOutcome:
        outcome = self._map.apply_heartbeat(heartbeat, self.clock())
        self._record(outcome.delta)
        return outcome

    def deregister(self, inst_id: InstId, incarnation: Incarnation) -> None:
        delta = self._map.deregister(inst_id, incarnation)
        self._record(delta)
        if delta.instances:
            _log.info("instance left", extra={"inst_id": inst_id})

    def expire(self, timeout_s: float) -> None:
        if self.whole_in_s > 0:
            return
        delta = self._map.expire(self.clock(), timeout_s)
        self._record(delta)
        for inst_id in sorted(delta.instances):
            _log.warning("instance silent, dropped", extra={"inst_id": inst_id})

    def instance(self, inst_id: InstId) -> Instance | None:
        return self._map.instance(inst_id)

    def instances(self) -> tuple[Instance, ...]:
        return self._map.instances()

    def cluster(self) -> Cluster:
        return self._map.cluster()

    def snapshot(self) -> PlacementView:
        return self._map.snapshot()
