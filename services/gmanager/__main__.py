"""`python -m services.gmanager`: builds the gManager, serves until a signal."""

import asyncio
import os
import sys

from prometheus_client import REGISTRY

from protos.infinite_llm.v1 import gmanager_pb2_grpc
from services.common.addresses import split_host_port
from services.common.config import from_env
from services.common.health import HealthReporter
from services.common.lifecycle import run, until_stopped
from services.common.rpc import new_server
from services.common.telemetry import configure_logging, configure_tracing, start_metrics_server
from services.gmanager.assembly import build
from services.gmanager.config import GManagerConfig
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.server import SERVICE_NAME, STOP_GRACE_S, listen


async def serve(config: GManagerConfig, stop: asyncio.Event) -> None:
    configure_logging("gmanager", config.log_level)
    tracing = configure_tracing("gmanager", config.otlp_endpoint)
    gmanager = build(config, GManagerMetrics(REGISTRY))
    server = new_server()
    gmanager_pb2_grpc.add_GManagerServicer_to_server(gmanager.servicer, server)
    health = HealthReporter(server, [SERVICE_NAME])
    listen(server, config.listen_address)
    host, _ = split_host_port(config.listen_address)
    with start_metrics_server(config.metrics_port, host):
        await gmanager.election.step()
        loops = (gmanager.store.run(), gmanager.planner.run(), gmanager.election.run())
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop) for loop in loops]
            await health.not_serving()
            await server.start()
            await until_stopped(asyncio.sleep(gmanager.keeper.whole_in_s), stop)
            await health.serving()
            await stop.wait()
            await health.not_serving()
            await server.stop(STOP_GRACE_S)
            for task in tasks:
                task.cancel()
        await gmanager.store.write_rest()
        await gmanager.election.resign()
        await gmanager.disconnect()
    tracing.shutdown()


if __name__ == "__main__":
    sys.exit(run(lambda stop: serve(from_env(GManagerConfig, os.environ), stop)))
