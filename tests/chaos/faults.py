"""Does to a real cluster what a schedule says, and undoes it."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable

from services.common.errors import Unavailable
from services.common.ids import InstId
from services.local.cluster import START_DEADLINE_S, STOP_DEADLINE_S, LocalCluster
from services.local.map_reader import ClusterView
from services.local.plan import worker_name
from tests.chaos.network import Network
from tests.chaos.schedule import Fault, Kind
from tests.integration.cluster import worker_metric


class Injector:
    """Knows what lives. Whatever it hurts is whole again when `inflict` returns."""

    def __init__(self, cluster: LocalCluster, network: Network) -> None:
        self.recomputed_tokens = 0
        """Of workers that have ended, as far as they had counted."""
        self._cluster = cluster
        self._network = network
        self._started_s = time.monotonic()

    async def follow(self, track: Iterable[Fault], end_s: float) -> None:
        """One after the other; none begins after `end_s`."""
        for fault in track:
            await asyncio.sleep(self._started_s + fault.at_s - time.monotonic())
            if time.monotonic() >= end_s:
                return
            await self._inflict(fault)

    async def _inflict(self, fault: Fault) -> None:
        if fault.kind is Kind.KILL_CREDITOR:
            await self._kill_worker(fault, await self._largest(_num_lent, fault.victim))
        elif fault.kind is Kind.KILL_OWNER:
            await self._kill_worker(fault, await self._largest(_num_owned, fault.victim))
        elif fault.kind is Kind.STOP_WORKER:
            await self._stop_worker(fault)
        elif fault.kind is Kind.CUT:
            await self._cut(fault)
        elif fault.kind is Kind.DRAIN_WORKER:
            await self._drain_worker(fault)
        elif fault.kind is Kind.KILL_GMANAGER:
            await self._kill(fault, f"gmanager-{fault.victim}")
        elif fault.kind is Kind.KILL_REDIS:
            await self._kill(fault, "redis")

    async def _kill_worker(self, fault: Fault, inst_id: InstId) -> None:
        await self._note_recomputed(inst_id)
        await self._kill(fault, worker_name(inst_id))

    async def _kill(self, fault: Fault, name: str) -> None:
        self._say(fault, f"killing {name}")
        await self._cluster.kill(name)
        await asyncio.sleep(fault.for_s)
        await self._cluster.restart(name)
        self._say(fault, f"{name} is back")

    async def _stop_worker(self, fault: Fault) -> None:
        pid = self._cluster.processes[worker_name(fault.victim)].pid
        assert pid is not None
        self._say(fault, f"stopping {worker_name(fault.victim)}")
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        self._say(fault, f"{worker_name(fault.victim)} goes on")

    async def _cut(self, fault: Fault) -> None:
        self._say(fault, f"cutting {fault.victim} from {fault.other}")
        self._network.cut(fault.victim, fault.other)
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            self._network.mend()
        self._say(fault, "mended")

    async def _drain_worker(self, fault: Fault) -> None:
        name = worker_name(fault.victim)
        await self._note_recomputed(fault.victim)
        self._say(fault, f"draining {name}")
        process = self._cluster.processes[name]
        if not await process.stop(STOP_DEADLINE_S):
            raise Unavailable(f"{name} did not end {STOP_DEADLINE_S:.0f} s after SIGTERM")
        if process.exit_status != 0:
            raise Unavailable(process.describe_end())
        await asyncio.sleep(fault.for_s)
        await self._cluster.restart(name)
        self._say(fault, f"{name} is back")

    async def _largest(
        self, count: Callable[[ClusterView], Counter[InstId]], otherwise: int
    ) -> InstId:
        """Who has most of it, as soon as a gManager says so."""
        view = await self._cluster.wait_view(lambda view: bool(view.instances), START_DEADLINE_S)
        most = count(view).most_common(1)
        return InstId(most[0][0] if most else otherwise)

    async def _note_recomputed(self, inst_id: int) -> None:
        metric = await worker_metric(self._cluster, inst_id, "recomputed_tokens_total")
        self.recomputed_tokens += int(metric)

    def _say(self, fault: Fault, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:6.1f} s  {text}", flush=True)


def _num_lent(view: ClusterView) -> Counter[InstId]:
    """Blocks by creditor."""
    lent: Counter[InstId] = Counter()
    for entry in view.entries:
        if not entry.local:
            lent[InstId(entry.inst_id)] += entry.num_blocks
    return lent


def _num_owned(view: ClusterView) -> Counter[InstId]:
    """Requests by owner."""
    return Counter(InstId(entry.inst_id) for entry in view.entries if entry.local)
