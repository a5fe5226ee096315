"""The election with a lease that answers as told and a clock that only the test moves."""

import asyncio
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from services.common.errors import NotLeader
from services.common.ids import Term
from services.gmanager.cluster import Cluster
from services.gmanager.election import Election
from services.gmanager.keeper import MapKeeper
from services.gmanager.leadership import Claim, Leadership
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import PlacementMap
from tests.unit.gmanager.builders import make_info, make_instance, make_row

LEASE_S = 4.0
STORED = Cluster((make_instance(1),), (make_row(7, 1, 3),))
MINE = Claim(True, "me", Term(5), LEASE_S)
RIVALS = Claim(False, "rival:1", Term(6), LEASE_S)


@dataclass
class ScriptedLease:
    """Answers with the claim, or fails."""

    answer: Claim | Exception | None
    period_s: float = 0.001
    known_terms: list[Term] = field(default_factory=list)
    is_released: bool = False

    async def claim(self, known_term: Term) -> Claim | None:
        self.known_terms.append(known_term)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def release(self) -> None:
        self.is_released = True


@dataclass
class Bench:
    lease: ScriptedLease
    now_s: float = 0.0
    num_loads: int = 0
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.keeper = MapKeeper(PlacementMap(), lambda delta: None, lambda: self.now_s, 1.0)
        metrics = GManagerMetrics(self.registry)
        self.election = Election(Leadership(LEASE_S), self.keeper, self.load, metrics, self.lease)

    async def load(self, now_s: float) -> Cluster:
        self.num_loads += 1
        assert not self.election.is_leader  # or the copy could be overwritten meanwhile
        return Cluster() if self.lease.answer is None else STORED

    async def step(self, answer: Claim | None, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.lease.answer = answer
        await self.election.step()

    @property
    def map_size(self) -> tuple[int, int]:
        cluster = self.keeper.cluster()
        return len(cluster.instances), len(cluster.entries)

    def sample(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"infinite_llm_gmanager_{name}")


@pytest.fixture
def bench() -> Bench:
    return Bench(ScriptedLease(MINE))


async def test_the_winner_begins_with_what_the_last_leader_knew(bench: Bench) -> None:
    await bench.step(MINE)
    assert bench.map_size == (1, 1)
    assert bench.keeper.whole_in_s == 0
    assert (bench.election.is_leader, bench.election.term) == (True, 5)
    assert bench.sample("leading") == 1
    bench.election.check_leads()


async def test_a_follower_holds_no_map_and_names_the_leader(bench: Bench) -> None:
    await bench.step(MINE)
    await bench.step(RIVALS, after_s=5.0)
    assert bench.map_size == (0, 0)
    assert (bench.election.is_leader, bench.sample("leading")) == (False, 0)
    with pytest.raises(NotLeader, match="rival:1"):
        bench.election.check_leads()
    assert bench.num_loads == 1


async def test_a_follower_takes_over_from_redis(bench: Bench) -> None:
    await bench.step(RIVALS)
    await bench.step(MINE, after_s=LEASE_S)
    assert bench.map_size == (1, 1)
    assert bench.election.is_leader


async def test_a_leader_that_lost_redis_goes_on_with_its_map(bench: Bench) -> None:
    await bench.step(MINE)
    bench.keeper.register(make_info(2))
    for after_s in (1.0, 1.0, 1.0):
        await bench.step(None, after_s)
    assert not bench.election.is_leader
    assert bench.election.planning_term is None
    bench.election.check_leads()
    await bench.step(MINE, after_s=1.0)
    assert bench.map_size == (2, 1)
    assert bench.num_loads == 1


async def test_without_redis_somebody_answers_whom_workers_can_report_to(bench: Bench) -> None:
    await bench.step(RIVALS)
    await bench.step(None, after_s=LEASE_S)
    bench.election.check_leads()
    assert bench.map_size == (0, 0)
    assert bench.keeper.whole_in_s == 1.0
    assert bench.election.planning_term is None


async def test_a_stand_in_that_comes_to_lead_waits_for_who_reported_to_another(
    bench: Bench,
) -> None:
    await bench.step(None)
    bench.keeper.register(make_info(2))
    await bench.step(None, after_s=3.0)
    assert bench.keeper.whole_in_s == 0
    await bench.step(MINE, after_s=1.0)
    assert bench.map_size == (1, 0)
    assert bench.keeper.whole_in_s == 1.0


async def test_a_stand_in_to_whom_nobody_reported_begins_from_redis(bench: Bench) -> None:
    await bench.step(None)
    assert bench.map_size == (0, 0)
    await bench.step(MINE, after_s=1.0)
    assert bench.map_size == (1, 1)


async def test_a_term_that_workers_heard_of_is_claimed_anew(bench: Bench) -> None:
    await bench.step(MINE)
    bench.election.learn_term(Term(9))
    assert not bench.election.is_leader
    await bench.step(MINE)
    assert bench.lease.known_terms == [0, 9]


async def test_who_resigns_leads_no_more_whatever_redis_says(bench: Bench) -> None:
    await bench.step(MINE)
    await bench.election.resign()
    assert bench.lease.is_released
    assert not bench.election.is_leader


async def test_an_unexpected_error_costs_one_round(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.lease.answer = RuntimeError("bug")
    task = asyncio.create_task(bench.election.run())
    async with asyncio.timeout(5.0):
        while "election failed" not in caplog.text:
            await asyncio.sleep(0.001)
        bench.lease.answer = MINE
        while not bench.election.is_leader:
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
