"""The API server is away for longer than a lease: nothing is lost, nothing is done twice."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_kube_config

from services.operator.api import Api
from tests.operator.conftest import LEASE_S, Place, until


class Line:
    """A way to the API server that can be cut."""

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


async def test_it_goes_on_when_the_server_is_back(place: Place) -> None:
    async with over_a_line() as (api, line), place.operator(api) as operator:
        await place.create(replicas=2)
        await place.until_serving(2)
        line.cut()
        await place.scale(4)
        await asyncio.sleep(3 * LEASE_S)
        assert len(place.nodes.pods) == 2
        assert not operator.done()
        line.is_cut = False
        await place.until_serving(4)
        await until(lambda: len(place.nodes.pods) == 4)
        assert (await place.reasons()).count("Created") == 4
