"""The planner with a clock that only the test moves and sources that answer as told."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.common.errors import Unavailable
from services.common.ids import InstId, Term
from services.gmanager import planner as planner_module
from services.gmanager.cluster import InstanceLoad, PlacementView
from services.gmanager.config import GManagerConfig
from services.gmanager.keeper import MapKeeper
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import Delta, PlacementMap
from services.gmanager.planner import MoveAnswer, MoveOrder, Planner
from services.gmanager.policy import Decision, Verdict, plan
from tests.unit.gmanager.builders import make_heartbeat, make_info, make_row

HELD_DOWN = InstanceLoad(
    free_blocks=0, running=2, waiting=6, waiting_blocks=60, running_tokens=1600
)
IDLE = InstanceLoad(free_blocks=100)
CONFIG = GManagerConfig()
TERM = Term(5)
REBUILD_S = 1.0
ACCEPTED = MoveAnswer(accepted=True, reason="", highest_term=TERM)


@dataclass
class Bench:
    """One debtor (1) and one idle creditor (2)."""

    config: GManagerConfig = CONFIG
    answer: MoveAnswer | Exception = ACCEPTED
    now_s: float = 0.0
    term: Term | None = TERM
    gone: asyncio.Event | None = None
    """Until then no source answers."""
    orders: list[MoveOrder] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        metrics = GManagerMetrics(self.registry)
        self.keeper = MapKeeper(PlacementMap(), self.deltas.append, lambda: self.now_s, REBUILD_S)
        self.planner = Planner(
            self.config, self.keeper, metrics, self.issue_move, lambda: self.term
        )
        for inst_id in (1, 2):
            self.keeper.register(make_info(inst_id))
        self.report(1)

    def report(self, sequence_number: int) -> None:
        row = make_row(7, 1, 80)
        debtor = make_heartbeat(1, sequence_number, row, full=True, load=HELD_DOWN)
        self.keeper.apply_heartbeat(debtor)
        self.keeper.apply_heartbeat(make_heartbeat(2, sequence_number, full=True, load=IDLE))

    async def issue_move(self, order: MoveOrder) -> MoveAnswer:
        self.orders.append(order)
        if self.gone is not None:
            await self.gone.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def run_round(self) -> None:
        await self.planner.run_once()
        await self.planner.settle()

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"infinite_llm_gmanager_{name}", labels)


async def test_a_planned_move_goes_to_its_source() -> None:
    bench = Bench()
    await bench.run_round()
    (order,) = bench.orders
    assert (order.move.req_id, order.move.num_blocks) == (7, 60)
    assert (order.source, order.destination) == (make_info(1), make_info(2))
    assert order.term == TERM
    assert bench.planner.decisions.moves_issued == 1


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        pytest.param(ACCEPTED, "accepted", id="accepted"),
        pytest.param(MoveAnswer(False, "full", TERM), "refused", id="refused"),
        pytest.param(Unavailable("gone"), "failed", id="failed"),
    ],
)
async def test_whatever_the_answer_the_request_rests(
    answer: MoveAnswer | Exception, outcome: str
) -> None:
    bench = Bench(answer=answer)
    await bench.run_round()
    bench.now_s = 1.0
    await bench.run_round()
    assert len(bench.orders) == 1
    assert bench.sample("moves_total", outcome=outcome) == 1
    resting, moved = bench.planner.decisions.find()
    assert [a.outcome for a in moved.answers.values()] == [outcome]
    assert resting.decision.verdict is Verdict.RESTING
    bench.now_s = CONFIG.cool_down_s
    bench.report(2)
    await bench.run_round()
    assert len(bench.orders) == 2


async def test_a_source_that_does_not_answer_delays_no_round() -> None:
    bench = Bench(config=GManagerConfig(cool_down_s=1.0), gone=asyncio.Event())
    await bench.planner.run_once()
    bench.now_s = 1.0
    bench.report(2)
    await bench.planner.run_once()
    assert bench.gone is not None
    bench.gone.set()
    await bench.planner.settle()
    assert len(bench.orders) == 2


async def test_heartbeats_are_answered_while_it_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """On what the map was when the round began."""
    bench, may_plan = Bench(), threading.Event()

    def slow_plan(view: PlacementView, *args: Any) -> list[Decision]:
        assert may_plan.wait(5.0)
        return plan(view, *args)

    monkeypatch.setattr(planner_module, "plan", slow_plan)
    planning = asyncio.create_task(bench.run_round())
    await asyncio.sleep(0)
    bench.keeper.apply_heartbeat(make_heartbeat(1, 2, make_row(7, 1, 0), full=True, load=IDLE))
    may_plan.set()
    await planning
    assert [order.move.num_blocks for order in bench.orders] == [60]


async def test_a_dry_run_plans_and_moves_nothing() -> None:
    bench = Bench(config=GManagerConfig(planner_dry_run=True))
    await bench.run_round()
    assert bench.orders == []
    assert bench.planner.decisions.moves_issued == 0
    assert bench.sample("moves_total", outcome="dry run") == 1


async def test_silent_instances_are_dropped_before_planning() -> None:
    bench = Bench()
    bench.now_s = 3.5
    await bench.run_round()
    assert bench.orders == []
    assert bench.keeper.instance(InstId(1)) is None
    assert bench.sample("instances") == 0


async def test_who_stood_still_drops_nobody_before_all_could_report_again() -> None:
    bench = Bench()
    await bench.run_round()
    bench.now_s = 20.0
    await bench.run_round()
    assert len(bench.keeper.instances()) == 2
    assert bench.keeper.whole_in_s == REBUILD_S  # nobody is shown what may be long untrue,
    assert len(bench.orders) == 1  # nor is anything planned on it
    bench.now_s += REBUILD_S
    bench.keeper.apply_heartbeat(make_heartbeat(2, 2, full=True, load=IDLE))
    await bench.run_round()
    assert [instance.inst_id for instance in bench.keeper.instances()] == [2]
    assert bench.keeper.whole_in_s == 0


async def test_without_pooling_nothing_moves_but_the_silent_still_leave() -> None:
    bench = Bench(config=GManagerConfig(pooling=False))
    await bench.run_round()
    bench.now_s = 3.5
    await bench.run_round()
    assert bench.orders == []
    assert bench.keeper.instances() == ()


async def test_who_does_not_lead_moves_nothing_but_the_silent_still_leave() -> None:
    bench = Bench(term=None)
    await bench.run_round()
    assert bench.orders == []
    bench.term = Term(6)
    await bench.run_round()
    assert [order.term for order in bench.orders] == [6]
    bench.term, bench.now_s = None, 3.5
    await bench.run_round()
    assert bench.keeper.instances() == ()


async def test_the_cluster_is_measured() -> None:
    bench = Bench()
    await bench.run_round()
    assert bench.sample("instances") == 2
    assert bench.sample("blocks", state="free") == 100
    assert bench.sample("plan_seconds_count") == 1


async def test_an_unexpected_error_costs_one_round(caplog: pytest.LogCaptureFixture) -> None:
    config = GManagerConfig(planning_period_s=0.001, cool_down_s=1.0)
    bench = Bench(config=config, answer=RuntimeError("bug"))
    task = asyncio.create_task(bench.planner.run())
    async with asyncio.timeout(5.0):
        while "order failed" not in caplog.text:
            await asyncio.sleep(0.001)
        bench.answer = ACCEPTED
        bench.now_s = config.cool_down_s
        bench.report(2)
        while len(bench.orders) < 2:
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
