"""Readiness is asked in each process's own language."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.common.addresses import free_ports
from services.common.health import HealthReporter
from services.common.rpc import new_server
from services.local.plan import ProbeKind, ProcessSpec
from services.local.probe import is_ready


def process(probe: ProbeKind, address: str) -> ProcessSpec:
    return ProcessSpec("child", (), {}, probe, address)


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Says the same to whoever connects, after the first line of the question."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_redis_is_ready_once_it_has_loaded() -> None:
    async with answering(b"+PONG\r\n") as address:
        assert await is_ready(process("redis", address))
    async with answering(b"-LOADING Redis is loading\r\n") as address:
        assert not await is_ready(process("redis", address))


@pytest.mark.parametrize(("status", "ready"), [("200 OK", True), ("503 Unavailable", False)])
async def test_http_is_ready_when_healthy(status: str, ready: bool) -> None:
    answer = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    async with answering(answer.encode()) as address:
        assert await is_ready(process("http", f"http://{address}")) is ready


async def test_grpc_is_ready_when_it_says_so() -> None:
    server = new_server()
    reporter = HealthReporter(server, [])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await reporter.not_serving()
    await server.start()
    assert not await is_ready(process("grpc", address))
    await reporter.serving()
    assert await is_ready(process("grpc", address))
    await server.stop(grace=None)


@pytest.mark.parametrize(("probe", "prefix"), [("redis", ""), ("grpc", ""), ("http", "http://")])
async def test_nobody_there_is_not_ready(probe: ProbeKind, prefix: str) -> None:
    (port,) = free_ports(1)
    assert not await is_ready(process(probe, f"{prefix}127.0.0.1:{port}"))
