"""`python -m services.worker`: one instance, from its settings to a clean end."""

import asyncio
import logging
import os
import sys
from typing import Any

import grpc

from protos.infinite_llm.v1 import worker_pb2, worker_pb2_grpc
from services.common.addresses import split_host_port
from services.common.config import from_env
from services.common.errors import ConfigError, InternalError
from services.common.health import HealthReporter
from services.common.lifecycle import in_daemon_thread, run, until_stopped
from services.common.model_store import default_cache_dir, resolve
from services.common.rpc import new_server
from services.common.telemetry import configure_logging, configure_tracing, start_metrics_server
from services.worker.assembly import Prepared, Worker, build, prepare
from services.worker.config import Config
from services.worker.profiling import measure_link
from services.worker.server import RManagerServicer, WorkerServicer

logger = logging.getLogger("services.worker")

_FIRST_VIEW_S = 2.0
_SERVICES = [service.full_name for service in worker_pb2.DESCRIPTOR.services_by_name.values()]


async def main(stop: asyncio.Event) -> None:
    config = from_env(Config, os.environ)
    configure_logging(f"worker-{config.inst_id}", config.log_level)
    tracing = configure_tracing("worker", config.otlp_endpoint)
    _keep_to(config.core_numbers)  # before any thread is started
    server = new_server()
    health = HealthReporter(server, _SERVICES)
    host, _ = split_host_port(config.listen_address)
    _listen(server, config.listen_address)  # a port in use is known before the model is loaded
    prepared = await until_stopped(in_daemon_thread(lambda: _prepare(config)), stop)
    if prepared is None:
        return
    worker = build(config, prepared, stop, health)
    generation = WorkerServicer(
        worker.engine, worker.streams, worker.checks, worker.rmanager, worker.drain
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(generation, server)
    worker_pb2_grpc.add_RManagerServicer_to_server(RManagerServicer(worker.rmanager), server)
    try:
        with start_metrics_server(config.metrics_port, host):
            await _serve(worker, server, health, config, stop)
    finally:
        await asyncio.to_thread(worker.engine.stop)
        await worker.rmanager.close()
        await server.stop(1.0)
        await asyncio.to_thread(worker.creditor.stop)
        tracing.shutdown()


def _prepare(config: Config) -> Prepared:
    return prepare(config, resolve(config.model, default_cache_dir(os.environ), logger.info))


async def _serve(
    worker: Worker,
    server: grpc.aio.Server,
    health: HealthReporter,
    config: Config,
    stop: asyncio.Event,
) -> None:
    worker.creditor.start()
    if config.pooling:
        await asyncio.to_thread(measure_link, worker.link, worker.info.perf)
    worker.engine.start()
    await health.not_serving()
    await server.start()
    rmanager = asyncio.create_task(worker.rmanager.run())
    engine = asyncio.create_task(asyncio.to_thread(worker.engine.wait))
    stopping = asyncio.create_task(stop.wait())
    try:
        # Who else is there decides what a request may use; without a gManager we serve alone.
        known = asyncio.create_task(worker.rmanager.heartbeat.first_view.wait())
        await asyncio.wait({known, stopping}, timeout=_FIRST_VIEW_S)
        known.cancel()
        if not worker.rmanager.is_draining:
            await health.serving()
        logger.info("ready", extra={"address": config.listen_address})
        await _first_of(stopping, rmanager, engine)
        await worker.drain.begin()
        draining = asyncio.create_task(worker.drain.finish())
        await _first_of(draining, rmanager, engine)
    finally:
        stopping.cancel()
        rmanager.cancel()


async def _first_of(
    awaited: asyncio.Task[Any], rmanager: asyncio.Task[None], engine: asyncio.Task[None]
) -> None:
    """Waits while both live, which they must."""
    tasks = {awaited, rmanager, engine}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not awaited.done():
        awaited.cancel()
        raise InternalError("the engine or the rManager ended; the log says why")


def _keep_to(cores: frozenset[int]) -> None:
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            text = f"INFINITE_LLM_CORES={','.join(map(str, sorted(cores)))}: {error.strerror}"
            raise ConfigError(text) from error


def _listen(server: grpc.aio.Server, address: str) -> None:
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"INFINITE_LLM_LISTEN_ADDRESS={address}: cannot listen there") from error


if __name__ == "__main__":
    sys.exit(run(main))
