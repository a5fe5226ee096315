"""Hours of random use in minutes: every checked answer must be right, and every block come back."""

import asyncio
import time
from dataclasses import dataclass
from random import Random

import grpc
import psutil

from protos.infinite_llm.v1 import worker_pb2, worker_pb2_grpc
from services.common.errors import InfiniteLLMError
from services.common.ids import new_req_id
from services.common.rpc import error_from_rpc
from services.local.cluster import LocalCluster
from services.local.plan import HOST
from tests.integration.cluster import leaked_blocks
from tests.soak.command import Tally
from tests.soak.scenarios import Scenario, checked_scenarios, random_scenario

NUM_CHECKED = 12
NUM_CLIENTS = 10
#: Longer than any queue, stall and attention deadline together: whoever waits longer hangs.
HANG_S = 180.0


@dataclass(slots=True)
class SoakTally(Tally):
    requests: int = 0
    tokens: int = 0
    aborted: int = 0
    refused: int = 0
    forced_moves: int = 0
    unanswered_moves: int = 0
    rss_growth_mb: float = 0.0
    wrong_tokens: int = 0
    hangs: int = 0
    leaked_blocks: int = 0


class Soak:
    """Clients that ask, and a meddler that moves blocks, until the time is over."""

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self._cluster = cluster
        self._random = Random(seed)
        self._capacity_tokens = cluster.spec.instance_capacity_tokens
        self._expected: dict[Scenario, list[int]] = {}
        self.tally = SoakTally(seed)

    async def run(self, duration_s: float) -> SoakTally:
        for scenario in checked_scenarios(self._random, NUM_CHECKED, self._capacity_tokens):
            self._expected[scenario] = await self._ask(scenario, 0)
        before = self._rss_mb()
        end_s = time.monotonic() + duration_s
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._client(end_s))
            tasks.create_task(self._meddle(end_s))
        self.tally.rss_growth_mb = round(self._rss_mb() - before, 1)
        self.tally.leaked_blocks = await leaked_blocks(self._cluster)
        return self.tally

    async def _client(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            is_checked = self._random.random() < 0.5
            scenario = (
                self._random.choice(list(self._expected))
                if is_checked
                else random_scenario(self._random, self._capacity_tokens)
            )
            inst_id = self._random.randrange(self._cluster.spec.num_instances)
            self.tally.requests += 1
            try:
                tokens = await asyncio.wait_for(self._ask(scenario, inst_id), HANG_S)
            except TimeoutError:
                self.tally.hangs += 1
                continue
            except InfiniteLLMError as error:
                if not error.is_retryable:
                    raise
                self.tally.refused += 1
                continue
            self.tally.tokens += len(tokens)
            self.tally.wrong_tokens += is_checked and tokens != self._expected[scenario]

    async def _ask(self, scenario: Scenario, inst_id: int) -> list[int]:
        request = worker_pb2.GenerateTokensRequest(
            req_id=new_req_id(),
            prompt_token_ids=scenario.prompt,
            max_tokens=scenario.max_tokens,
            sampling=scenario.sampling,
            priority=scenario.priority,
            ignore_eos=True,
        )
        tokens: list[int] = []
        async with grpc.aio.insecure_channel(self._address(inst_id)) as channel:
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            call = stub.Generate(request)
            try:
                async for answer in call:
                    tokens += answer.token_ids
                    if scenario.abort_after is not None and len(tokens) > scenario.abort_after:
                        self.tally.aborted += 1
                        call.cancel()
                        break
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
        return tokens

    async def _meddle(self, end_s: float) -> None:
        """Order moves that no planner would, from whoever runs something to somebody else."""
        while time.monotonic() < end_s:
            await asyncio.sleep(self._random.uniform(0.1, 0.6))
            try:
                self.tally.forced_moves += await self._force_move()
            except InfiniteLLMError as error:
                # A machine that is busy with other things may be late once in half an hour.
                if not error.is_retryable:
                    raise
                self.tally.unanswered_moves += 1

    async def _force_move(self) -> bool:
        view = await self._cluster.view()
        own = [entry for entry in view.entries if entry.local]
        if not own:
            return False
        entry = self._random.choice(own)
        others = [i.info for i in view.instances if i.info.inst_id != entry.inst_id]
        request = worker_pb2.MoveKvCacheRequest(
            req_id=entry.req_id,
            num_blocks=self._random.randint(1, 8),
            dst=self._random.choice(others),
            term=view.term,
        )
        async with grpc.aio.insecure_channel(self._address(entry.inst_id)) as channel:
            stub: worker_pb2_grpc.RManagerAsyncStub = worker_pb2_grpc.RManagerStub(channel)
            try:
                answer = await stub.MoveKvCache(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from error
        return answer.accepted

    def _rss_mb(self) -> float:
        """Of the workers together."""
        workers = (p for name, p in self._cluster.processes.items() if name.startswith("worker"))
        return sum(psutil.Process(worker.pid).memory_info().rss for worker in workers) / 2**20

    def _address(self, inst_id: int) -> str:
        return f"{HOST}:{self._cluster.ports.workers[inst_id]}"
