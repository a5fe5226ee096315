"""A relay on loopback that slows, holds back or encrypts what passes through it."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]


@dataclass
class Relay:
    """`delay_s` is what every piece of an answer takes longer; nothing gets through unless
    `passing` is set, and nobody is told."""

    address: str = ""
    delay_s: float = 0.0
    passing: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, connect: Connect, outer: Streams) -> None:
        await self.passing.wait()
        try:
            inner = await connect()
        except OSError:
            outer[1].close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(outer[0], inner[1], is_slow=False))
                group.create_task(self._pass(inner[0], outer[1], is_slow=True))
        except* OSError:
            pass
        finally:
            for _, writer in (outer, inner):
                writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_slow: bool
    ) -> None:
        while data := await reader.read(2**16):
            await asyncio.sleep(self.delay_s if is_slow else 0.0)
            await self.passing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionError("one end has closed: close the other")


@asynccontextmanager
async def relaying(connect: Connect, tls: ssl.SSLContext | None = None) -> AsyncIterator[Relay]:
    relay = Relay()
    relay.passing.set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(relay.serve(connect, (reader, writer)))
        relay.tasks.add(task)
        task.add_done_callback(relay.tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
    host, port = server.sockets[0].getsockname()
    relay.address = f"{host}:{port}"
    try:
        yield relay
    finally:
        server.close()
        for task in relay.tasks:
            task.cancel()
        await asyncio.gather(*relay.tasks, return_exceptions=True)


def to_socket(path: Path) -> Connect:
    return lambda: asyncio.open_unix_connection(path)


def certify(folder: Path, name: str) -> Path:
    """A certificate of 127.0.0.1 that signs itself; its key lies beside it."""
    certificate = folder / f"{name}.pem"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(certificate.with_suffix(".key")), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-days", "1", *kind, *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    return certificate


def server_context(certificate: Path) -> ssl.SSLContext:
    """Of a server that proves itself by what `certify` made."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context
