"""A network between the workers that can be cut between two of them.

With the rights for it, every worker gets a network namespace of its own on a common bridge, and a
cut is one of the bridge: nothing passes between the two, neither data nor control, and nobody is
told. Elsewhere the data plane runs through relays, and a cut holds back what goes to the second.
"""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from services.common.addresses import free_ports, split_host_port
from services.common.config import variable_name
from services.local.plan import HOST, ProcessSpec
from tests.integration.proxy import Relay, relaying

#: Of every worker, in its own namespace.
_DATA_PORT = 7101


class Network(Protocol):
    def place(self, process: ProcessSpec) -> ProcessSpec:
        """The planned process, put into this network."""

    def cut(self, first: int, second: int) -> None: ...

    def mend(self) -> None:
        """Undo every cut."""


@asynccontextmanager
async def network_of(num_workers: int) -> AsyncIterator[Network]:
    namespaces = Namespaces(num_workers)
    try:
        namespaces.create()
    except (OSError, subprocess.CalledProcessError):
        namespaces.remove()
        async with AsyncExitStack() as stack:
            yield await Relays.open(num_workers, stack)
        return
    try:
        yield namespaces
    finally:
        namespaces.remove()


class Namespaces:
    """One for each worker; everybody else stays where this process is, and reaches them all."""

    def __init__(self, num_workers: int) -> None:
        mark = os.getpid() % 2**16
        self._subnet = f"10.{200 + mark // 2**13}.{mark % 250}"
        self._bridge = f"chaos{mark:04x}"
        self._names = [f"{self._bridge}-{number}" for number in range(num_workers)]

    def create(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._subnet}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for number, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self._host(number)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for command in [("netns", "del", name) for name in self._names]:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip(*command)
        with suppress(OSError, subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    def place(self, process: ProcessSpec) -> ProcessSpec:
        _, port = split_host_port(process.address)
        if process.inst_id is not None:
            host = self._host(process.inst_id)
            gmanagers = process.settings[variable_name("gmanager_address")]
            settings = _changed(
                process,
                listen_address=f"{host}:{port}",
                data_address=f"tcp:{host}:{_DATA_PORT}",
                gmanager_address=gmanagers.replace(HOST, f"{self._subnet}.1"),
            )
            argv = ("ip", "netns", "exec", self._names[process.inst_id], *process.argv)
            return replace(process, argv=argv, settings=settings, address=f"{host}:{port}")
        if process.name.startswith("gmanager"):
            settings = _changed(
                process,
                listen_address=f"0.0.0.0:{port}",
                advertise_address=f"{self._subnet}.1:{port}",
            )
            return replace(process, settings=settings)
        return process

    def cut(self, first: int, second: int) -> None:
        # Isolated ports of a bridge reach all but one another.
        for number in (first, second):
            self._isolate(number, "on")

    def mend(self) -> None:
        for number in range(len(self._names)):
            self._isolate(number, "off")

    def _isolate(self, number: int, switch: str) -> None:
        _ip("link", "set", self._names[number], "type", "bridge_slave", "isolated", switch)

    def _host(self, number: int) -> str:
        return f"{self._subnet}.{2 + number}"


class Relays:
    """One before the data address of each worker, all in this process."""

    def __init__(self, ports: list[int], relays: list[Relay]) -> None:
        self._ports = ports
        self._relays = relays

    @classmethod
    async def open(cls, num_workers: int, stack: AsyncExitStack) -> "Relays":
        ports = free_ports(num_workers)
        connects = [partial(asyncio.open_connection, HOST, port) for port in ports]
        return cls(ports, [await stack.enter_async_context(relaying(c)) for c in connects])

    def place(self, process: ProcessSpec) -> ProcessSpec:
        if process.inst_id is None:
            return process
        settings = _changed(
            process,
            data_address=f"tcp:{HOST}:{self._ports[process.inst_id]}",
            advertise_data_address=f"tcp:{self._relays[process.inst_id].address}",
        )
        return replace(process, settings=settings)

    def cut(self, first: int, second: int) -> None:
        self._relays[second].passing.clear()

    def mend(self) -> None:
        for relay in self._relays:
            relay.passing.set()


def _changed(process: ProcessSpec, **fields: str) -> Mapping[str, str]:
    changes = {variable_name(field): value for field, value in fields.items()}
    return {**process.settings, **changes}


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
