"""Age order between instances, over real calls: an older request makes a younger one give way."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.ids import ReqId
from services.worker.rank import Rank
from tests.unit.worker.rmanager.rig import Instance, eventually
from tests.unit.worker.rmanager.test_moves import all_free

Pair = tuple[Instance, Instance]
OLD_S, YOUNG_S = 1000.0, 2000.0


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with (
        Instance(1, tmp_path, num_blocks=8, lease_s=2.0) as first,
        Instance(2, tmp_path, num_blocks=16, lease_s=2.0) as second,
    ):
        first.meet(second)
        second.meet(first)
        yield first, second


async def running(instance: Instance, req_id: int) -> None:
    """Its prompt is computed."""
    await eventually(lambda: instance.engine.snapshot.local_blocks.get(ReqId(req_id), 0) >= 10)


async def test_a_creditor_s_younger_request_gives_way_and_ends_later(pair: Pair) -> None:
    first, second = pair
    second.runner.step_s = 0.05  # or it would have ended by itself
    younger = asyncio.create_task(second.generate(44, 18, req_id=2, arrived_at_s=YOUNG_S))
    await running(second, 2)
    first.meet(second)  # which has nothing to lend
    assert await first.generate(30, 30, req_id=1, arrived_at_s=OLD_S) == [7] * 30
    assert second.engine.snapshot.preemptions >= 1
    assert first.engine.snapshot.preemptions == 0
    second.runner.step_s = 0.0
    assert await younger == [7] * 18
    await eventually(lambda: all_free(first, second))


async def test_a_creditor_s_older_request_does_not(pair: Pair) -> None:
    first, second = pair
    second.runner.step_s = 0.05
    older = asyncio.create_task(second.generate(44, 18, req_id=2, arrived_at_s=OLD_S))
    await running(second, 2)
    first.meet(second)
    younger = asyncio.create_task(first.generate(30, 30, req_id=1, arrived_at_s=YOUNG_S))
    assert await older == [7] * 18
    assert second.engine.snapshot.preemptions == 0
    first.meet(second)
    assert await younger == [7] * 30
    await eventually(lambda: all_free(first, second))


async def test_a_recall_takes_from_an_older_request_only_what_costs_nothing(pair: Pair) -> None:
    first, second = pair
    first.runner.step_s = 0.01
    older = asyncio.create_task(first.generate(36, 20, req_id=1, arrived_at_s=OLD_S))
    await eventually(lambda: first.engine.snapshot.borrowed_blocks >= 4)
    second.recaller.recall(2, Rank(0, YOUNG_S, ReqId(9)))
    assert await older == [7] * 20
    assert first.engine.snapshot.preemptions == 0
    await eventually(lambda: all_free(first, second))


async def test_a_recall_for_an_older_request_makes_a_younger_one_give_way(pair: Pair) -> None:
    first, second = pair
    first.runner.step_s = 0.01
    younger = asyncio.create_task(first.generate(36, 20, req_id=1, arrived_at_s=YOUNG_S))
    await eventually(lambda: first.engine.snapshot.borrowed_blocks >= 4)
    second.recaller.recall(99, Rank(0, OLD_S, ReqId(9)))
    await eventually(lambda: first.engine.snapshot.preemptions == 1)
    await eventually(lambda: second.lender.num_lent_blocks == 0)
    first.meet(second)
    assert await younger == [7] * 20
    await eventually(lambda: all_free(first, second))
