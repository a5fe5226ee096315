"""Asks a process whether it is ready: gRPC health, HTTP health, or Redis PING."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.addresses import split_host_port
from services.common.rpc import PROBE_DEADLINE_S, open_channel
from services.local.plan import ProbeKind, ProcessSpec


async def is_ready(spec: ProcessSpec) -> bool:
    return await _PROBES[spec.probe](spec.address)


async def _is_grpc_serving(address: str) -> bool:
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(service=""), timeout=PROBE_DEADLINE_S
            )
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _is_http_healthy(address: str) -> bool:
    async with httpx.AsyncClient(timeout=PROBE_DEADLINE_S, trust_env=False) as client:
        try:
            return (await client.get(f"{address}/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


async def _is_redis_answering(address: str) -> bool:
    host, port = split_host_port(address)
    try:
        async with asyncio.timeout(PROBE_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False


_PROBES: dict[ProbeKind, Callable[[str], Awaitable[bool]]] = {
    "grpc": _is_grpc_serving,
    "http": _is_http_healthy,
    "redis": _is_redis_answering,
}
