"""Many streams through the front door while everything behind it is hurt: right tokens, or an error
that says so, in time, and no block lost."""

import asyncio
import time
from dataclasses import dataclass
from random import Random

import httpx

from services.local.cluster import LocalCluster
from tests.chaos.faults import Injector
from tests.chaos.network import Network
from tests.chaos.schedule import Schedule
from tests.chaos.streams import Answer
from tests.integration.cluster import http_client, leaked_blocks, worker_metric
from tests.soak.command import Tally
from tests.soak.run import HANG_S
from tests.soak.scenarios import Scenario, checked_scenarios

NUM_STREAMS = 20
#: Long enough that faults hit the middle of most streams.
MAX_TOKENS = (24, 72)
RESUMED = "infinite_llm_router_streams_resumed_total"


@dataclass(slots=True)
class ChaosTally(Tally):
    streams: int = 0
    survived: int = 0
    resumed: int = 0
    recomputed_tokens: int = 0
    failed_with_a_clear_error: int = 0
    wrong_tokens: int = 0
    hangs: int = 0
    leaked_blocks: int = 0


class Chaos:
    """Always `NUM_STREAMS` streams at once, and the injector, until the time is over."""

    def __init__(self, cluster: LocalCluster, network: Network, seed: int) -> None:
        self._cluster = cluster
        self._network = network
        self._random = Random(seed)
        self._expected: dict[Scenario, Answer] = {}
        self.tally = ChaosTally(seed)

    async def run(self, schedule: Schedule, duration_s: float) -> ChaosTally:
        async with http_client(self._cluster) as client:
            await self._run_undisturbed(client)
            injector = Injector(self._cluster, self._network)
            end_s = time.monotonic() + duration_s
            async with asyncio.TaskGroup() as tasks:
                streams = [
                    tasks.create_task(self._stream(client, end_s)) for _ in range(NUM_STREAMS)
                ]
                async with asyncio.TaskGroup() as faults:
                    for track in (schedule.workers, schedule.control):
                        faults.create_task(injector.follow(track, end_s))
                # One that lost its owner again and again may take long, but not from now on.
                _, hanging = await asyncio.wait(streams, timeout=HANG_S)
                for stream in hanging:
                    stream.cancel()
            self.tally.hangs = len(hanging)
            self.tally.resumed = await _num_resumed(client)
        self.tally.leaked_blocks = await leaked_blocks(self._cluster)
        self.tally.recomputed_tokens = injector.recomputed_tokens
        for inst_id in range(self._cluster.spec.num_instances):
            recomputed = await worker_metric(self._cluster, inst_id, "recomputed_tokens_total")
            self.tally.recomputed_tokens += int(recomputed)
        return self.tally

    async def _run_undisturbed(self, client: httpx.AsyncClient) -> None:
        capacity_tokens = self._cluster.spec.instance_capacity_tokens
        scenarios = checked_scenarios(self._random, NUM_STREAMS, capacity_tokens, MAX_TOKENS)
        for scenario in scenarios:
            self._expected[scenario] = Answer()
        async with asyncio.TaskGroup() as tasks:
            for scenario, answer in self._expected.items():
                tasks.create_task(answer.read(client, self._cluster.spec.model_name, scenario))
        for answer in self._expected.values():
            assert answer.finish_reason == "length", answer

    async def _stream(self, client: httpx.AsyncClient, end_s: float) -> None:
        while time.monotonic() < end_s:
            scenario, expected = self._random.choice(list(self._expected.items()))
            answer = Answer()
            self.tally.streams += 1
            await answer.read(client, self._cluster.spec.model_name, scenario)
            self._count(answer, expected)
            if answer.failed_clearly:
                await asyncio.sleep(1.0)  # as Retry-After says

    def _count(self, answer: Answer, expected: Answer) -> None:
        if not answer.agrees_with(expected):
            self.tally.wrong_tokens += 1
            print(f"wrong: {answer}\nwanted: {expected}")
        elif answer.finish_reason is not None:
            self.tally.survived += 1
        else:
            assert answer.failed_clearly, answer
            self.tally.failed_with_a_clear_error += 1


async def _num_resumed(client: httpx.AsyncClient) -> int:
    text = (await client.get("/metrics")).text
    return int(float(text.split(f"\n{RESUMED} ")[1].split()[0]))
