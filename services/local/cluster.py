"""A whole cluster on this machine: started, inspected, hurt and stopped as one.

The commands `up` and `demo` and the integration tests all run clusters through this class.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

from services.common.addresses import free_ports
from services.common.errors import InfiniteLLMError, Unavailable
from services.local.map_reader import ClusterView, MapReader
from services.local.plan import HOST, ClusterSpec, Ports, ProcessSpec, plan_stages
from services.local.probe import is_ready
from services.local.process import ManagedProcess
from services.local.progress import Progress

#: From exec to ready. A worker reads the model and measures itself, slowly on a busy machine.
START_DEADLINE_S = 180.0
#: From SIGTERM to SIGKILL, for each process. Workers let running requests finish for a while.
STOP_DEADLINE_S = 15.0
_POLL_S = 0.1
#: In the runtime folder, for `status`.
DESCRIPTION_FILE = "cluster.json"


class LocalCluster:
    """Owns the processes. `folder` must exist; it receives logs and sockets.

    `place` may put each planned process elsewhere, for example into a network of its own.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        folder: Path,
        redis_server: str,
        environ: Mapping[str, str],
        place: Callable[[ProcessSpec], ProcessSpec] = lambda process: process,
    ) -> None:
        self.spec = spec
        self.folder = folder
        self.ports = _choose_ports(spec)
        self._stages = [
            [ManagedProcess(place(process), folder, environ) for process in stage]
            for stage in plan_stages(spec, self.ports, folder, redis_server)
        ]
        self.processes = {process.spec.name: process for stage in self._stages for process in stage}

    @property
    def http_url(self) -> str:
        return f"http://{HOST}:{self.ports.http}"

    @property
    def grpc_address(self) -> str:
        return f"{HOST}:{self.ports.grpc}"

    @property
    def gmanager_address(self) -> str:
        """Of the gManager, or of all of them, separated by commas."""
        return self.ports.gmanager_addresses

    async def start(self, progress: Progress) -> None:
        """Starts stage by stage. Where one fails, what already runs is stopped again."""
        for process in self.processes.values():
            process.log_path.unlink(missing_ok=True)
        try:
            for stage in self._stages:
                async with progress.step(f"starting {_names(stage)}"):
                    for process in stage:
                        process.start()
                    await asyncio.gather(*(self.wait_ready(p.spec.name) for p in stage))
        except BaseException:
            await self.stop()
            raise
        description = {"gmanager_address": self.gmanager_address, "http_url": self.http_url}
        (self.folder / DESCRIPTION_FILE).write_text(json.dumps(description))

    async def stop(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Stops in the reverse order of the start. What does not end in time is killed."""
        (self.folder / DESCRIPTION_FILE).unlink(missing_ok=True)
        for stage in reversed(self._stages):
            if not any(process.is_running for process in stage):
                continue
            say(f"stopping {_names(stage)}")
            in_time = await asyncio.gather(*(process.stop(STOP_DEADLINE_S) for process in stage))
            for process, was_in_time in zip(stage, in_time, strict=True):
                if not was_in_time:
                    say(f"{process.spec.name} had to be killed after {STOP_DEADLINE_S:.0f} s")

    async def kill(self, name: str) -> None:
        """SIGKILL: what a crash looks like to the others."""
        await self.processes[name].kill()

    async def restart(self, name: str) -> None:
        """Starts a process that has ended once more and waits until it is ready."""
        self.processes[name].start()
        await self.wait_ready(name)

    async def wait_ready(self, name: str) -> None:
        """Raises Unavailable when the process ends, or is not ready in time."""
        process = self.processes[name]
        end = time.monotonic() + START_DEADLINE_S
        while not await self._is_ready(process):
            if not process.is_running:
                raise Unavailable(process.describe_end())
            if time.monotonic() > end:
                raise Unavailable(f"{name} is not ready after {START_DEADLINE_S:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def view(self) -> ClusterView:
        """The Request Placement Map as the gManager sees it now."""
        async with MapReader(self.gmanager_address) as reader:
            return await reader.read()

    async def wait_view(
        self, is_reached: Callable[[ClusterView], bool], deadline_s: float
    ) -> ClusterView:
        """The first view that satisfies the predicate, or the one at the deadline.

        Until then a gManager that does not answer is asked again.
        """
        end = time.monotonic() + deadline_s
        async with MapReader(self.gmanager_address) as reader:
            while True:
                is_late = time.monotonic() > end
                try:
                    view = await reader.read()
                except InfiniteLLMError:
                    if is_late:
                        raise
                else:
                    if is_reached(view) or is_late:
                        return view
                await asyncio.sleep(_POLL_S)

    async def _is_ready(self, process: ManagedProcess) -> bool:
        if not await is_ready(process.spec):
            return False
        if process.spec.inst_id is None:
            return True
        # The router's first look at the map must already show every instance.
        try:
            view = await self.view()
        except InfiniteLLMError:
            return False
        return any(instance.info.inst_id == process.spec.inst_id for instance in view.instances)


def _names(stage: list[ManagedProcess]) -> str:
    return ", ".join(process.spec.name for process in stage)


def _choose_ports(spec: ClusterSpec) -> Ports:
    num_workers, num_gmanagers = spec.num_instances, spec.num_gmanagers
    ports = iter(free_ports(3 + 2 * num_gmanagers + 2 * num_workers))
    http, grpc = next(ports), next(ports)
    return Ports(
        http=spec.http_port or http,
        grpc=spec.grpc_port or grpc,
        redis=next(ports),
        gmanagers=tuple(islice(ports, num_gmanagers)),
        gmanager_metrics=tuple(islice(ports, num_gmanagers)),
        workers=tuple(islice(ports, num_workers)),
        worker_metrics=tuple(islice(ports, num_workers)),
    )
