"""rManagers that register and heartbeat, each over a connection of its own, and do nothing else."""

import asyncio
import random
import time
from dataclasses import dataclass, replace

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc
from services.common.errors import InternalError
from services.common.rpc import CONTROL_DEADLINE_S, open_channel
from services.gmanager import convert
from services.gmanager.cluster import Cluster, Instance, PlacementEntry

#: Connections that are opened at once.
_NUM_AT_ONCE = 50


@dataclass(slots=True)
class SimulatedRManager:
    instance: Instance
    rows: list[PlacementEntry]
    source: random.Random
    sequence_number: int = 0

    @property
    def registration(self) -> gmanager_pb2.RegisterRequest:
        return gmanager_pb2.RegisterRequest(info=convert.info_to_proto(self.instance.info))

    def whole_report(self) -> gmanager_pb2.HeartbeatRequest:
        return self._report(self.rows, full=True)

    def changes(self, num_changed: int) -> gmanager_pb2.HeartbeatRequest:
        """So many requests gained or lost a block, and the load with them."""
        changed = self.source.sample(range(len(self.rows)), min(num_changed, len(self.rows)))
        for at in changed:
            row = self.rows[at]
            # Up and down, so that the instance stays as full as it is.
            self.rows[at] = replace(row, num_blocks=row.num_blocks ^ 1 or 2)
        return self._report([self.rows[at] for at in changed], full=False)

    def _report(self, rows: list[PlacementEntry], full: bool) -> gmanager_pb2.HeartbeatRequest:
        self.sequence_number += 1
        load = replace(self.instance.load, tokens_per_s=self.source.random())
        return gmanager_pb2.HeartbeatRequest(
            inst_id=self.instance.inst_id,
            incarnation=self.instance.info.incarnation,
            sequence_number=self.sequence_number,
            full=full,
            entries=map(convert.entry_to_proto, rows),
            load=convert.load_to_proto(load),
        )


def rmanagers_of(cluster: Cluster) -> list[SimulatedRManager]:
    rows: dict[int, list[PlacementEntry]] = {i.inst_id: [] for i in cluster.instances}
    for entry in cluster.entries:
        rows[entry.inst_id].append(entry)
    return [
        SimulatedRManager(instance, rows[instance.inst_id], random.Random(instance.inst_id))
        for instance in cluster.instances
    ]


class Fleet:
    """All rManagers of a cluster, in this process, each with a connection of its own."""

    def __init__(self, cluster: Cluster, gmanager_address: str) -> None:
        self._rmanagers = rmanagers_of(cluster)
        self._channels = [open_channel(gmanager_address) for _ in self._rmanagers]
        self._stubs: list[gmanager_pb2_grpc.GManagerAsyncStub] = [
            gmanager_pb2_grpc.GManagerStub(channel) for channel in self._channels
        ]

    async def join(self) -> None:
        """Everybody registers and reports everything."""
        for at in range(0, len(self._rmanagers), _NUM_AT_ONCE):
            some = range(at, min(at + _NUM_AT_ONCE, len(self._rmanagers)))
            await asyncio.gather(*map(self._join, some))

    async def _join(self, index: int) -> None:
        rmanager, stub = self._rmanagers[index], self._stubs[index]
        await stub.Register(rmanager.registration, timeout=CONTROL_DEADLINE_S, wait_for_ready=True)
        await stub.Heartbeat(rmanager.whole_report(), timeout=CONTROL_DEADLINE_S)

    async def beat_for(self, duration_s: float, period_s: float, num_changed: int) -> float:
        """Each beats once a period, evenly spread; returns how many beats a second came through."""
        started_s, num_beats = time.perf_counter(), 0

        async def run(index: int) -> None:
            nonlocal num_beats
            next_s = started_s + period_s * index / len(self._rmanagers)
            while next_s < started_s + duration_s:
                await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
                report = self._rmanagers[index].changes(num_changed)
                answer = await self._stubs[index].Heartbeat(report, timeout=CONTROL_DEADLINE_S)
                if answer.register_again or answer.full_report:
                    raise InternalError("the gManager lost a report")
                num_beats += 1
                next_s += period_s

        async with asyncio.TaskGroup() as group:
            for index in range(len(self._rmanagers)):
                group.create_task(run(index))
        return num_beats / (time.perf_counter() - started_s)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
