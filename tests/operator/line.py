"""A way to the API server that can be cut."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_kube_config

from services.operator.api import Api


class Line:
    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._open: set[asyncio.StreamWriter] = set()
        self.is_cut = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.close()
            return
        far_reader, far_writer = await asyncio.open_connection(*self._server)
        self._open |= {writer, far_writer}
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._open:
            writer.close()
        self._open.clear()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def over_a_line() -> AsyncIterator[tuple[Api, Line]]:
    configuration = Configuration()
    await load_kube_config(  # type: ignore[no-untyped-call]
        os.environ["KUBECONFIG"], client_configuration=configuration
    )
    server = urlsplit(configuration.host)
    assert server.hostname is not None
    line = Line(server.hostname, server.port or 443)
    listening = await asyncio.start_server(line.carry, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    configuration.host = f"https://127.0.0.1:{port}"
    configuration.tls_server_name = server.hostname
    api = Api(ApiClient(configuration))
    yield api, line
    await api.close()
    line.cut()
    listening.close()
