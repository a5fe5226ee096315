"""Restarts what dies. Runs beside a cluster for as long as `up` stays."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import Unavailable
from services.local.cluster import LocalCluster
from services.local.process import ManagedProcess

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class BackOff:
    """How long to wait before a restart: twice as long each time, until a start has held."""

    first_s: float = 0.5
    max_s: float = 30.0
    #: A process that ran this long starts over at `first_s`.
    held_s: float = 60.0

    def next_delay_s(self, last_delay_s: float, ran_s: float) -> float:
        if last_delay_s == 0 or ran_s >= self.held_s:
            return self.first_s
        return min(self.max_s, last_delay_s * 2)


async def watch(cluster: LocalCluster, say: Callable[[str], None], back_off: BackOff) -> None:
    """Never returns; cancel it before stopping the cluster."""
    async with asyncio.TaskGroup() as tasks:
        for name in cluster.processes:
            tasks.create_task(_keep_alive(cluster, name, say, back_off))


async def _keep_alive(
    cluster: LocalCluster, name: str, say: Callable[[str], None], back_off: BackOff
) -> None:
    process = cluster.processes[name]
    delay_s = 0.0
    while True:
        await _wait_end(process)
        delay_s = back_off.next_delay_s(delay_s, time.monotonic() - process.started_at)
        say(f"{process.describe_end()}\n    restarting in {delay_s:.1f} s")
        await asyncio.sleep(delay_s)
        try:
            await cluster.restart(name)
            say(f"{name} is back")
        except Unavailable as error:
            say(f"{name} is not back: {error.message.splitlines()[0]}")


async def _wait_end(process: ManagedProcess) -> None:
    while process.is_running:
        await asyncio.sleep(_POLL_S)
