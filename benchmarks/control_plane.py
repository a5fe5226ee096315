"""`python -m benchmarks.control_plane`: the gManager with a thousand instances and more.

Plans are timed in this process, as the planner makes them. Heartbeats go to a gManager process
with a Redis of its own, from simulated rManagers, each over a gRPC connection of its own; what
counts is the processor time of the gManager. Then it is started anew from that Redis.
"""

import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
from prometheus_client import CollectorRegistry

from benchmarks.command import new_parser, run
from benchmarks.report import Report
from benchmarks.simulated_cluster import Shape, simulate
from benchmarks.simulated_rmanagers import Fleet, rmanagers_of
from protos.infinite_llm.v1 import gmanager_pb2
from services.common.addresses import free_ports
from services.common.errors import InfiniteLLMError, InternalError
from services.common.ids import Term
from services.gmanager import convert
from services.gmanager.assembly import build
from services.gmanager.config import GManagerConfig
from services.gmanager.keeper import MapKeeper
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import PlacementMap
from services.gmanager.planner import MoveAnswer, MoveOrder, Planner
from services.gmanager.server import Context
from services.local.map_reader import MapReader
from services.local.plan import HOST, ClusterSpec, Ports, plan_stages
from services.local.preflight import find_redis_server
from services.local.probe import is_ready
from services.local.process import ManagedProcess

#: Above the simulated batches, so that whoever is held down is a debtor.
_BATCH_THRESHOLD = 256
_PERIOD_S = 1.0
#: Of an instance's 100 requests, those that gained or lost a block since the last heartbeat.
_NUM_CHANGED = 10
_DEADLINE_S = 30.0
#: Heartbeats that arrive together, where there is no network between.
_NUM_AT_ONCE = 10
#: Only errors would go there.
_NO_CONTEXT = cast(Context, None)


@dataclass(frozen=True, slots=True)
class PlanTime:
    plan_s: float
    num_moves: int


@dataclass(frozen=True, slots=True)
class HeartbeatLoad:
    beats_per_s: float
    cores: float
    """Processor time in each second."""


@dataclass(frozen=True, slots=True)
class Figures:
    servicer: HeartbeatLoad
    over_grpc: HeartbeatLoad
    warm_restart_s: float


async def time_plan(shape: Shape, repeats: int) -> PlanTime:
    """The median of a few rounds, each by a fresh planner: all of a round but the sources' part."""
    placement_map = PlacementMap()
    placement_map.restore(simulate(shape), now_s=0.0)
    config = GManagerConfig(batch_threshold=_BATCH_THRESHOLD)
    orders: list[MoveOrder] = []

    async def issue(order: MoveOrder) -> MoveAnswer:
        orders.append(order)
        return MoveAnswer(accepted=True, reason="", highest_term=Term(1))

    times_s = []
    for _ in range(repeats):
        orders.clear()
        keeper = MapKeeper(placement_map, lambda delta: None, lambda: 0.0, rebuild_s=0.0)
        metrics = GManagerMetrics(CollectorRegistry())
        planner = Planner(config, keeper, metrics, issue, lambda: Term(1))
        started_s = time.perf_counter()
        await planner.run_once()
        times_s.append(time.perf_counter() - started_s)
        await planner.settle()
    return PlanTime(statistics.median(times_s), len(orders))


class GManagerUnderTest:
    """A gManager process and a Redis; started, loaded, started anew."""

    def __init__(self, folder: Path) -> None:
        overrides = {
            "batch_threshold": _BATCH_THRESHOLD,
            "heartbeat_period_s": _PERIOD_S,
            # Nobody beats while it is started anew.
            "instance_timeout_s": _DEADLINE_S,
            # There is nobody who could move anything.
            "planner_dry_run": True,
        }
        spec = ClusterSpec(Path(), "simulated", 0, overrides={"gmanager": overrides})
        http, grpc, redis, gmanager, metrics = free_ports(5)
        ports = Ports(http, grpc, redis, (gmanager,), (metrics,), workers=(), worker_metrics=())
        redis_server = find_redis_server(os.environ)
        self.redis_url = f"redis://{HOST}:{ports.redis}/0"
        self._redis, self._gmanager = (
            ManagedProcess(process, folder, os.environ)
            for (process,) in plan_stages(spec, ports, folder, redis_server)[:2]
        )

    @property
    def address(self) -> str:
        return self._gmanager.spec.address

    async def start(self) -> float:
        """Returns the seconds from the start of the process until it serves."""
        started_s = time.perf_counter()
        self._gmanager.start()
        await _until_ready(self._gmanager)
        return time.perf_counter() - started_s

    async def stop(self) -> None:
        await self._gmanager.stop(_DEADLINE_S)

    def cpu_s(self) -> float:
        times = psutil.Process(self._gmanager.pid).cpu_times()
        return float(times.user + times.system)

    @asynccontextmanager
    async def redis(self) -> AsyncIterator[None]:
        self._redis.start()
        try:
            await _until_ready(self._redis)
            yield
        finally:
            await self.stop()
            await self._redis.stop(_DEADLINE_S)


async def _until_ready(process: ManagedProcess) -> None:
    end_s = time.perf_counter() + _DEADLINE_S
    while not await is_ready(process.spec):
        if time.perf_counter() > end_s or not process.is_running:
            raise InternalError(process.describe_end())
        await asyncio.sleep(0.01)


async def time_heartbeats(
    under_test: GManagerUnderTest, fleet: Fleet, duration_s: float
) -> HeartbeatLoad:
    """Over gRPC, into the process."""
    await fleet.beat_for(2 * _PERIOD_S, _PERIOD_S, _NUM_CHANGED)  # warm up
    before_s, started_s = under_test.cpu_s(), time.perf_counter()
    beats_per_s = await fleet.beat_for(duration_s, _PERIOD_S, _NUM_CHANGED)
    cores = (under_test.cpu_s() - before_s) / (time.perf_counter() - started_s)
    return HeartbeatLoad(beats_per_s, cores)


async def time_servicer(shape: Shape, redis_url: str, num_rounds: int) -> HeartbeatLoad:
    """Bytes into the servicer and out of it, and into Redis, in this process: all but gRPC."""
    metrics, rmanagers = GManagerMetrics(CollectorRegistry()), rmanagers_of(simulate(shape))
    gmanager = build(GManagerConfig(redis_url=redis_url, leader_lease_s=0), metrics)
    await gmanager.election.step()
    for rmanager in rmanagers:
        gmanager.keeper.register(convert.info_from_proto(rmanager.registration.info))
        gmanager.keeper.apply_heartbeat(convert.heartbeat_from_proto(rmanager.whole_report()))
    await gmanager.store.flush()
    rounds = (r.changes(_NUM_CHANGED) for _ in range(num_rounds) for r in rmanagers)
    reports = [report.SerializeToString() for report in rounds]
    writer = asyncio.create_task(gmanager.store.run())
    before_s, started_s = time.process_time(), time.perf_counter()
    for index, report in enumerate(reports):
        if index % _NUM_AT_ONCE == 0:
            wait_s = started_s + index * _PERIOD_S / len(rmanagers) - time.perf_counter()
            await asyncio.sleep(max(0.0, wait_s))
        request = gmanager_pb2.HeartbeatRequest.FromString(report)
        (await gmanager.servicer.Heartbeat(request, _NO_CONTEXT)).SerializeToString()
    wall_s = time.perf_counter() - started_s
    cores = (time.process_time() - before_s) / wall_s
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    await gmanager.disconnect()
    return HeartbeatLoad(len(reports) / wall_s, cores)


async def count_rows(address: str) -> int:
    """As soon as it answers: a gManager that has just begun may want to hear the workers first."""
    async with MapReader(address) as reader:
        end_s = time.perf_counter() + _DEADLINE_S
        while True:
            try:
                return len((await reader.read()).entries)
            except InfiniteLLMError:
                if time.perf_counter() > end_s:
                    raise
                await asyncio.sleep(0.1)


async def measure(shape: Shape, duration_s: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="infinite-llm-") as folder:
        under_test = GManagerUnderTest(Path(folder))
        async with under_test.redis():
            servicer = await time_servicer(shape, under_test.redis_url, duration_s)
            await under_test.start()
            cluster = simulate(shape)
            fleet = Fleet(cluster, under_test.address)
            try:
                await fleet.join()
                over_grpc = await time_heartbeats(under_test, fleet, duration_s)
            finally:
                await fleet.close()
            await under_test.stop()
            warm_restart_s = await under_test.start()
            restored = await count_rows(under_test.address)
            if restored != len(cluster.entries):
                raise InternalError(f"{restored} of {len(cluster.entries)} rows were restored")
    return Figures(servicer, over_grpc, warm_restart_s)


def show(report: Report, plans: dict[int, PlanTime], figures: Figures) -> None:
    report.table(
        "Planning rounds, 100 running requests on each instance",
        ("instances", "ms", "moves"),
        [(str(n), f"{time.plan_s * 1e3:.0f}", str(time.num_moves)) for n, time in plans.items()],
    )
    report.table(
        f"Heartbeats of changes, {_NUM_CHANGED} rows and the load in each",
        ("path", "beats/s", "cores"),
        [
            (name, f"{load.beats_per_s:.0f}", f"{load.cores:.2f}")
            for name, load in (
                ("servicer, map, Redis", figures.servicer),
                ("with gRPC, planning, process", figures.over_grpc),
            )
        ],
    )
    report.say(f"A new process serves the map of the old one after {figures.warm_restart_s:.2f} s.")


def main(arguments: list[str]) -> None:
    parser, report = new_parser("control_plane", __doc__), Report()
    options = parser.parse_args(arguments)
    report.machine(options.threads)
    logging.disable(logging.INFO)  # a line for each move, as for a gManager's own log
    sizes = (1_000,) if options.quick else (1_000, 10_000)
    plans = {n: asyncio.run(time_plan(Shape(n), repeats=5)) for n in sizes}
    figures = asyncio.run(measure(Shape(1_000), duration_s=5 if options.quick else 15))
    show(report, plans, figures)
    report.last_line(
        {
            "plan_s": {str(n): round(time.plan_s, 4) for n, time in plans.items()},
            "heartbeat_cores": round(figures.servicer.cores, 3),
            "heartbeats_per_s": round(figures.servicer.beats_per_s),
            "heartbeat_cores_with_grpc": round(figures.over_grpc.cores, 3),
            "heartbeats_per_s_with_grpc": round(figures.over_grpc.beats_per_s),
            "warm_restart_s": round(figures.warm_restart_s, 2),
        }
    )


if __name__ == "__main__":
    sys.exit(run(main))
