"""`status`: draw the Request Placement Map of a running cluster, or what its planner decided."""

import asyncio
import json

from rich.console import Console
from rich.live import Live

from services.common.errors import ConfigError
from services.common.lifecycle import until_stopped
from services.local.cluster import DESCRIPTION_FILE
from services.local.console import draw_map
from services.local.decisions import draw_decisions
from services.local.map_reader import MapReader
from services.local.preflight import runtime_folder

_WATCH_PERIOD_S = 0.5


async def status(
    gmanager_address: str, is_watching: bool, console: Console, stop: asyncio.Event
) -> None:
    async with MapReader(gmanager_address) as reader:
        if is_watching:
            await until_stopped(_watch(reader, console), stop)
        else:
            console.print(draw_map(await reader.read()))


async def show_decisions(gmanager_address: str, req_id: int | None, console: Console) -> None:
    async with MapReader(gmanager_address) as reader:
        console.print(draw_decisions(await reader.decisions(req_id)))


def find_gmanager(http_port: int) -> str:
    """The gManager of the cluster that `up` runs behind this port."""
    file = runtime_folder(http_port) / DESCRIPTION_FILE
    if not file.exists():
        raise ConfigError(f"no cluster of this user serves port {http_port}")
    return str(json.loads(file.read_text())["gmanager_address"])


async def _watch(reader: MapReader, console: Console) -> None:
    with Live(draw_map(await reader.read()), console=console, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            live.update(draw_map(await reader.read()), refresh=True)
