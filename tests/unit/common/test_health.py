"""Health follows what the service says of itself; reflection lists what it serves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.health import LIVENESS, HealthReporter
from services.common.rpc import PROBE_DEADLINE_S, new_server, open_channel

SERVICE = "infinite_llm.v1.Worker"
Status = health_pb2.HealthCheckResponse


@asynccontextmanager
async def reporting() -> AsyncIterator[tuple[HealthReporter, grpc.aio.Channel]]:
    server = new_server()
    reporter = HealthReporter(server, [SERVICE])
    port = server.add_insecure_port("127.0.0.1:0")
    await reporter.not_serving()
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield reporter, channel
    await server.stop(grace=None)


async def check(channel: grpc.aio.Channel, name: str) -> Any:
    request = health_pb2.HealthCheckRequest(service=name)
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(request, timeout=PROBE_DEADLINE_S)).status


async def test_health_changes_for_the_server_and_its_services() -> None:
    async with reporting() as (reporter, channel):
        assert await check(channel, "") == Status.NOT_SERVING
        await reporter.serving()
        assert await check(channel, "") == Status.SERVING
        assert await check(channel, SERVICE) == Status.SERVING
        await reporter.not_serving()
        assert await check(channel, SERVICE) == Status.NOT_SERVING


async def test_a_server_that_is_not_ready_is_alive() -> None:
    async with reporting() as (reporter, channel):
        await reporter.be_ready(False)
        assert await check(channel, LIVENESS) == Status.SERVING
        await reporter.be_ready(True)
        assert await check(channel, LIVENESS) == Status.SERVING


async def test_a_watcher_sees_the_change() -> None:
    async with reporting() as (reporter, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=PROBE_DEADLINE_S)
        assert (await watch.read()).status == Status.NOT_SERVING
        await reporter.serving()
        assert (await watch.read()).status == Status.SERVING
        watch.cancel()


async def test_reflection_lists_the_service() -> None:
    async with reporting() as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        call = stub.ServerReflectionInfo(iter(requests), timeout=PROBE_DEADLINE_S)
        names = [
            service.name
            async for response in call
            for service in response.list_services_response.service
        ]
    assert SERVICE in names
