"""`python -m services.worker`: one instance, from its settings to a clean end."""

import asyncio
import logging
import os
import sys

import grpc

from protos.infinite_llm.v1 import worker_pb2, worker_pb2_grpc
from services.common.config import from_env
from services.common.errors import ConfigError, InternalError
from services.common.health import HealthReporter
from services.common.lifecycle import run
from services.common.model_store import default_cache_dir, resolve
from services.common.rpc import new_server
from services.common.telemetry import configure_logging, configure_tracing, start_metrics_server
from services.worker.assembly import Worker, build
from services.worker.config import Config
from services.worker.server import RManagerServicer, WorkerServicer

logger = logging.getLogger("services.worker")

_SERVICES = [service.full_name for service in worker_pb2.DESCRIPTOR.services_by_name.values()]


async def main(stop: asyncio.Event) -> None:
    config = from_env(Config, os.environ)
    configure_logging(f"worker-{config.inst_id}", config.log_level)
    tracing = configure_tracing("worker", config.otlp_endpoint)
    folder = resolve(config.model, default_cache_dir(os.environ), logger.info)
    # The loop answers nobody yet: loading may block it.
    worker = build(config, folder, asyncio.get_running_loop())
    server = new_server()
    health = HealthReporter(server, _SERVICES)
    generation = WorkerServicer(worker.engine, worker.streams, worker.limits, worker.rmanager)
    worker_pb2_grpc.add_WorkerServicer_to_server(generation, server)
    worker_pb2_grpc.add_RManagerServicer_to_server(RManagerServicer(worker.rmanager), server)
    _listen(server, config.listen_address)
    with start_metrics_server(config.metrics_port):
        await _serve(worker, server, health, config, stop)
    tracing.shutdown()


async def _serve(
    worker: Worker,
    server: grpc.aio.Server,
    health: HealthReporter,
    config: Config,
    stop: asyncio.Event,
) -> None:
    worker.engine.start()
    await server.start()
    rmanager = asyncio.create_task(worker.rmanager.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await health.serving()
        logger.info("ready", extra={"address": config.listen_address})
        await asyncio.wait({rmanager, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if rmanager.done():
            raise InternalError(f"the rManager ended: {rmanager.exception()!r}")
        await health.not_serving()
        await _drain(worker, config.drain_timeout_s)
    finally:
        stopping.cancel()
        rmanager.cancel()
        await asyncio.to_thread(worker.engine.stop)
        await worker.rmanager.close()
        await server.stop(1.0)
        await asyncio.to_thread(worker.creditor.stop)


async def _drain(worker: Worker, timeout_s: float) -> None:
    """No new requests, no new loans; those that run may finish until the deadline."""
    worker.rmanager.is_draining = True
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while worker.streams.num_open and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(0.05)


def _listen(server: grpc.aio.Server, address: str) -> None:
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"INFINITE_LLM_LISTEN_ADDRESS={address}: cannot listen there") from error


if __name__ == "__main__":
    sys.exit(run(main))
