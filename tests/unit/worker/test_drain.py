"""Draining: nothing new, what was lent goes back, what runs may end before the deadline."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from protos.infinite_llm.v1 import worker_pb2
from services.common.errors import InvalidRequest, Unavailable
from services.common.rpc import error_from_rpc
from services.worker.drain import Drain
from services.worker.rmanager.pace import Pace
from tests.unit.worker.rmanager.rig import BLOCK, Instance, eventually
from tests.unit.worker.rmanager.test_moves import all_free, move
from tests.unit.worker.test_server import error_of


@pytest.fixture
async def instance(tmp_path: Path) -> AsyncIterator[Instance]:
    async with Instance(1, tmp_path, num_blocks=16, lease_s=2.0) as instance:
        yield instance


def drain_of(instance: Instance, timeout_s: float = 5.0) -> Drain:
    return Drain(instance.rmanager, instance.streams, instance.stop, timeout_s, instance.be_ready)


async def call_drain(
    instance: Instance, deadline_s: float = 0.0, stay: bool = False
) -> worker_pb2.DrainResponse:
    channel, stub = instance.stub()
    async with channel:
        request = worker_pb2.DrainRequest(deadline_s=deadline_s, stay=stay)
        return await stub.Drain(request, timeout=5)


async def call_undrain(instance: Instance) -> None:
    channel, stub = instance.stub()
    async with channel:
        await stub.Undrain(worker_pb2.UndrainRequest(), timeout=5)


async def test_a_drain_lets_what_runs_end_and_takes_nothing_new(instance: Instance) -> None:
    answer = asyncio.create_task(instance.generate(num_prompt=3, max_tokens=20))
    await eventually(lambda: instance.engine.snapshot.num_running == 1)
    drain = drain_of(instance)
    await drain.begin()
    assert instance.stop.is_set()
    finishing = asyncio.create_task(drain.finish())
    assert isinstance(await error_of(instance, req_id=2), Unavailable)
    assert await answer == [7] * 20
    await asyncio.wait_for(finishing, 1.0)


async def test_an_idle_instance_has_nothing_to_wait_for(instance: Instance) -> None:
    drain = drain_of(instance, timeout_s=60.0)
    await drain.begin()
    await asyncio.wait_for(drain.finish(), 0.5)


async def test_the_deadline_ends_the_wait(instance: Instance) -> None:
    instance.runner.step_s = 0.05
    answer = asyncio.create_task(instance.generate(num_prompt=3, max_tokens=50))
    await eventually(lambda: instance.engine.snapshot.num_running == 1)
    drain = drain_of(instance, timeout_s=0.1)
    await drain.begin()
    await asyncio.wait_for(drain.finish(), 1.0)
    assert not answer.done()
    await asyncio.to_thread(instance.engine.stop)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    assert isinstance(error_from_rpc(caught.value), Unavailable)


async def test_the_call_begins_a_drain_and_ends_the_process_after_it(instance: Instance) -> None:
    await call_drain(instance)
    assert instance.rmanager.is_draining
    assert instance.stop.is_set()
    await call_drain(instance)


@pytest.mark.parametrize("deadline_s", [-1.0, float("inf"), float("nan")])
async def test_a_deadline_that_is_none_is_refused(instance: Instance, deadline_s: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_drain(instance, deadline_s)
    assert isinstance(error_from_rpc(caught.value), InvalidRequest)
    assert not instance.rmanager.is_draining


@pytest.mark.parametrize(
    ("first", "second", "allowed_s"),
    [(None, None, 5.0), (60.0, None, 60.0), (None, 0.2, 0.2), (0.2, 60.0, 0.2)],
)
async def test_the_earliest_deadline_that_was_asked_for_holds(
    instance: Instance, first: float | None, second: float | None, allowed_s: float
) -> None:
    drain = drain_of(instance, timeout_s=5.0)
    await drain.begin(first)
    await drain.begin(second)
    left_s = drain._deadline_s - asyncio.get_running_loop().time()
    assert left_s == pytest.approx(allowed_s, abs=0.1)


async def test_a_drained_creditor_has_given_everything_back(
    instance: Instance, tmp_path: Path
) -> None:
    """And its borrower has computed nothing again."""
    async with Instance(2, tmp_path, num_blocks=16, lease_s=2.0) as creditor:
        answer = asyncio.create_task(instance.generate(num_prompt=24, max_tokens=30))
        await eventually(lambda: instance.engine.snapshot.running_tokens >= 24)
        assert await move(instance, creditor, 4)
        await eventually(lambda: instance.engine.snapshot.borrowed_blocks == 4)
        drain = drain_of(creditor)
        await drain.begin()
        await asyncio.wait_for(drain.finish(), 3.0)
        assert all_free(creditor)
        assert await answer == [7] * 30
        assert instance.engine.snapshot.preemptions == 0
        assert instance.engine.snapshot.recomputed == 0


async def test_what_is_still_being_copied_to_a_drained_creditor_stays_with_its_owner(
    tmp_path: Path,
) -> None:
    async with (
        Instance(1, tmp_path, num_blocks=64, lease_s=2.0, pace=Pace(1, 1)) as owner,
        Instance(2, tmp_path, num_blocks=64, lease_s=2.0) as creditor,
    ):
        answer = asyncio.create_task(owner.generate(num_prompt=30 * BLOCK, max_tokens=40))
        await eventually(lambda: owner.engine.snapshot.running_tokens >= 30 * BLOCK)
        assert await move(owner, creditor, 29)
        await eventually(lambda: creditor.lender.num_lent_blocks > 0)
        drain = drain_of(creditor)
        await drain.begin()
        await asyncio.wait_for(drain.finish(), 3.0)
        assert all_free(creditor)
        assert await answer == [7] * 40
        assert (owner.mover.moved_blocks, owner.retriever.taken_back_blocks) == (0, 0)


async def test_a_drain_that_stays_says_what_there_still_is(
    instance: Instance, tmp_path: Path
) -> None:
    async with Instance(2, tmp_path, num_blocks=16, lease_s=2.0) as creditor:
        instance.runner.step_s = 0.02
        answer = asyncio.create_task(instance.generate(num_prompt=24, max_tokens=30))
        await eventually(lambda: instance.engine.snapshot.running_tokens >= 24)
        assert await move(instance, creditor, 4)
        await eventually(lambda: instance.engine.snapshot.borrowed_blocks == 4)
        assert (await call_drain(creditor, stay=True)).lent_blocks == 4
        assert (await call_drain(instance, stay=True)).open_requests == 1
        assert await answer == [7] * 30
        for each in (instance, creditor):
            assert await call_drain(each, stay=True) == worker_pb2.DrainResponse()
            assert all_free(each)
            assert not each.stop.is_set()


async def test_a_drain_that_stays_can_be_called_back(instance: Instance, tmp_path: Path) -> None:
    async with Instance(2, tmp_path, num_blocks=16, lease_s=2.0) as owner:
        await call_drain(instance, stay=True)
        assert isinstance(await error_of(instance, req_id=2), Unavailable)
        await call_undrain(instance)
        await call_undrain(instance)
        assert instance.readiness == [False, True]
        assert await instance.generate(num_prompt=3, max_tokens=4) == [7] * 4
        owner.runner.step_s = 0.02
        answer = asyncio.create_task(owner.generate(num_prompt=24, max_tokens=30))
        await eventually(lambda: owner.engine.snapshot.running_tokens >= 24)
        assert await move(owner, instance, 4)
        await eventually(lambda: owner.engine.snapshot.borrowed_blocks == 4)
        assert await answer == [7] * 30


async def test_a_drain_that_ends_the_process_cannot_be_called_back(instance: Instance) -> None:
    await call_drain(instance, stay=True)
    await call_drain(instance)
    assert instance.stop.is_set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call_undrain(instance)
    assert isinstance(error_from_rpc(caught.value), Unavailable)
    assert instance.rmanager.is_draining


async def test_a_signal_after_a_drain_that_stays_adds_no_time(instance: Instance) -> None:
    instance.runner.step_s = 0.05
    answer = asyncio.create_task(instance.generate(num_prompt=3, max_tokens=50))
    await eventually(lambda: instance.engine.snapshot.num_running == 1)
    drain = drain_of(instance, timeout_s=60.0)
    await drain.hold(0.1)
    await drain.begin()
    await asyncio.wait_for(drain.finish(), 1.0)
    answer.cancel()
