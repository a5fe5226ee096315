"""A stand-in for a stopped process: connections stay open, but nothing comes through."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.unit.router.cluster import FakeWorker


class Gate:
    """Passes bytes between a router and one worker while it is open."""

    def __init__(self, behind: str) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._behind = behind
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        host, port = self._behind.split(":")
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.TaskGroup() as both_ways:
                both_ways.create_task(self._pass_on(reader, inner_writer))
                both_ways.create_task(self._pass_on(inner_reader, writer))
        finally:
            inner_writer.close()
            writer.close()
            self._serving.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self.is_open.wait()
            writer.write(data)
        await self.is_open.wait()
        writer.close()

    async def close(self) -> None:
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


@asynccontextmanager
async def gate_before(worker: FakeWorker) -> AsyncIterator[Gate]:
    """From now on the worker reports the gate's address as its own."""
    gate = Gate(worker.address)
    server = await asyncio.start_server(gate.serve, "127.0.0.1", 0)
    worker.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield gate
    finally:
        server.close()
        await gate.close()
