"""`python -m services.gmanager`: wires the parts, serves until a signal."""

import asyncio
import os
import sys
import time

from prometheus_client import REGISTRY

from protos.infinite_llm.v1 import gmanager_pb2_grpc
from services.common.addresses import split_host_port
from services.common.config import from_env
from services.common.health import HealthReporter
from services.common.ids import Term
from services.common.lifecycle import run
from services.common.rpc import new_server
from services.common.telemetry import configure_logging, configure_tracing, start_metrics_server
from services.gmanager.config import GManagerConfig
from services.gmanager.keeper import MapKeeper
from services.gmanager.leadership import Leadership
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import PlacementMap
from services.gmanager.planner import MoveAnswer, MoveOrder, Planner
from services.gmanager.rmanager_client import issue_move
from services.gmanager.server import SERVICE_NAME, STOP_GRACE_S, GManagerServicer, listen
from services.gmanager.store import Store, connect


async def serve(config: GManagerConfig, stop: asyncio.Event) -> None:
    configure_logging("gmanager", config.log_level)
    tracing = configure_tracing("gmanager", config.otlp_endpoint)
    metrics = GManagerMetrics(REGISTRY)
    placement_map = PlacementMap()
    store = Store(connect(config.redis_url), placement_map, metrics.redis_up)
    keeper = MapKeeper(placement_map, store.record, time.monotonic)
    # Milliseconds since 1970: higher than the terms of all processes before it.
    leadership = Leadership.sole(Term(time.time_ns() // 1_000_000))

    async def issue(order: MoveOrder) -> MoveAnswer:
        answer = await issue_move(order)
        leadership.on_term(answer.highest_term)
        return answer

    planner = Planner(
        config, keeper, metrics, issue, lambda: leadership.planning_term(keeper.clock())
    )
    server = new_server()
    servicer = GManagerServicer(config, keeper, metrics, lambda: planner.moves_issued, leadership)
    gmanager_pb2_grpc.add_GManagerServicer_to_server(servicer, server)
    health = HealthReporter(server, [SERVICE_NAME])
    listen(server, config.listen_address)
    host, _ = split_host_port(config.listen_address)
    with start_metrics_server(config.metrics_port, host):
        keeper.restore(await store.load(keeper.clock()))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(store.run()), group.create_task(planner.run())]
            await server.start()
            await health.serving()
            await stop.wait()
            await health.not_serving()
            await server.stop(STOP_GRACE_S)
            for task in tasks:
                task.cancel()
        await store.close()
    tracing.shutdown()


if __name__ == "__main__":
    sys.exit(run(lambda stop: serve(from_env(GManagerConfig, os.environ), stop)))
