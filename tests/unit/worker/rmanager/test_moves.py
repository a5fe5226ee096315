"""The move protocol between two instances: reserve, copy, commit, free, and every way to fail."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.errors import PartLost
from services.common.ids import InstId, ReqId
from services.worker.engine.scheduler import Scheduler
from tests.unit.worker.rmanager.rig import BLOCK, Instance, eventually

Pair = tuple[Instance, Instance]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with (
        Instance(1, tmp_path, num_blocks=8, lease_s=1.0) as source,
        Instance(2, tmp_path, num_blocks=16, lease_s=1.0) as creditor,
    ):
        source.meet(creditor)
        yield source, creditor


def all_free(*instances: Instance) -> bool:
    return all(i.pool.num_free == i.pool.num_blocks for i in instances)


async def move(source: Instance, creditor: Instance, num_blocks: int) -> bool:
    """The gManager's order, over gRPC."""
    info = types_pb2.InstanceInfo(
        inst_id=creditor.me.inst_id,
        incarnation=creditor.me.incarnation,
        control_address=creditor.view.control_address,
        data_address=creditor.me.data_address,
        block_size=BLOCK,
        block_bytes=creditor.view.block_bytes,
        model="m",
        num_blocks=16,
    )
    request = worker_pb2.MoveKvCacheRequest(req_id=1, num_blocks=num_blocks, dst=info)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{source.port}") as channel:
        stub: worker_pb2_grpc.RManagerAsyncStub = worker_pb2_grpc.RManagerStub(channel)
        answer = await stub.MoveKvCache(request, timeout=5)
    return answer.accepted


async def test_a_planned_move_copies_commits_and_frees(pair: Pair) -> None:
    source, creditor = pair
    await source.submit(1, num_prompt=12, max_tokens=4000)
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    assert await move(source, creditor, 2)
    await eventually(lambda: source.engine.snapshot.borrowed_blocks >= 2)
    held = creditor.lender.blocks_by_request()[(ReqId(1), InstId(1))]
    assert held == source.engine.snapshot.borrowed_blocks

    def span_blocks(scheduler: Scheduler) -> list[int]:
        sequence = scheduler.find(ReqId(1))
        assert sequence is not None
        span = sequence.table.remote[0]
        part = creditor.lender.open_part(source.me.inst_id, source.me.incarnation, (span.move_id,))
        return part.block_ids

    blocks = await source.on_engine(span_blocks)
    assert isinstance(blocks, list)
    copied = creditor.storage.pool[blocks, 0, 0, 0, :, 0].flatten()
    assert copied.tolist() == [float(t) for t in range(100, 100 + len(copied))]
    await source.on_engine(lambda s: s.abort(ReqId(1), 0.0))
    await eventually(lambda: all_free(source, creditor))


async def test_a_long_prompt_borrows_by_itself_and_gives_back_at_the_end(pair: Pair) -> None:
    source, creditor = pair
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, creditor.lender.num_lent_blocks)
            await asyncio.sleep(0.002)

    watcher = asyncio.create_task(watch())
    assert await source.generate(num_prompt=60, max_tokens=5) == [7] * 5
    watcher.cancel()
    assert peak >= 8
    await eventually(lambda: all_free(source, creditor))


async def test_a_refusal_leaves_everything_where_it_was(pair: Pair) -> None:
    source, creditor = pair
    creditor.rmanager.begin_drain()
    await source.submit(1, num_prompt=12, max_tokens=40)
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    assert await move(source, creditor, 2)
    await eventually(lambda: source.mover.failed_moves >= 1)
    assert source.engine.snapshot.borrowed_blocks == 0
    assert all_free(creditor)


async def test_a_destination_that_is_gone_costs_nothing(pair: Pair) -> None:
    source, creditor = pair
    await asyncio.to_thread(creditor.creditor.stop)  # grants, but takes no block
    answer = asyncio.create_task(source.generate(num_prompt=12, max_tokens=12))
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    await move(source, creditor, 2)
    assert await answer == [7] * 12
    await eventually(lambda: all_free(source, creditor))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source_incarnation": 3}, "earlier start"),
        ({"req_id": 9}, "no block"),
        ({"num_blocks": 0}, "no block"),
        ({"dst": types_pb2.InstanceInfo(inst_id=1)}, "the same"),
    ],
)
async def test_orders_that_cannot_be_are_refused(
    pair: Pair, change: dict[str, object], reason: str
) -> None:
    source, _ = pair
    await source.submit(1, num_prompt=12, max_tokens=400)
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    fields: dict[str, object] = {
        "req_id": 1,
        "num_blocks": 1,
        "dst": types_pb2.InstanceInfo(inst_id=2),
    }
    request = worker_pb2.MoveKvCacheRequest(**(fields | change))  # type: ignore[arg-type]
    answer = await source.rmanager.move_kvcache(request)
    assert not answer.accepted
    assert reason in answer.reason


async def test_a_plan_of_a_leader_that_was_replaced_is_refused(pair: Pair) -> None:
    source, _ = pair
    request = worker_pb2.MoveKvCacheRequest(
        req_id=9, num_blocks=1, dst=types_pb2.InstanceInfo(inst_id=2), term=5
    )
    assert "no block" in (await source.rmanager.move_kvcache(request)).reason
    request.term = 4
    answer = await source.rmanager.move_kvcache(request)
    assert not answer.accepted
    assert "leads no more" in answer.reason
    assert answer.highest_term == 5


async def test_a_reservation_for_an_earlier_start_is_refused(pair: Pair) -> None:
    _, creditor = pair
    request = worker_pb2.TryMoveKvCacheRequest(
        num_blocks=1, source_inst_id=1, source_incarnation=5, move_id=9,
        dst_incarnation=4, source_control_address="127.0.0.1:1",
    )  # fmt: skip
    answer = await creditor.rmanager.creditor.try_move_kvcache(request)
    assert not answer.granted
    request.dst_incarnation = creditor.me.incarnation
    request.source_control_address = ""  # could never be asked back
    assert not (await creditor.rmanager.creditor.try_move_kvcache(request)).granted
    request.source_control_address = "127.0.0.1:1"
    answer = await creditor.rmanager.creditor.try_move_kvcache(request)
    assert answer.granted
    assert answer.lease_s == 1.0
    await eventually(lambda: all_free(creditor))  # nobody used it: the lease ends


async def test_leases_of_running_requests_are_renewed(pair: Pair) -> None:
    """Nothing reads the part here (the runner pretends), so only renewals keep it alive."""
    source, creditor = pair
    await source.submit(1, num_prompt=12, max_tokens=4000)
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    await move(source, creditor, 2)
    await eventually(lambda: source.engine.snapshot.borrowed_blocks >= 2)
    source.runner.step_s = 0.1  # or the request would outgrow both pools meanwhile
    await asyncio.sleep(2.5)  # two and a half leases
    assert source.engine.snapshot.preemptions == 0
    assert creditor.lender.num_lent_blocks >= 2
    await source.on_engine(lambda s: s.abort(ReqId(1), 0.0))


async def test_a_part_that_the_creditor_dropped_is_recomputed(pair: Pair) -> None:
    source, creditor = pair
    answer = asyncio.create_task(source.generate(num_prompt=12, max_tokens=80))
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    await move(source, creditor, 2)
    await eventually(lambda: source.engine.snapshot.borrowed_blocks >= 2)
    moves = source.engine.snapshot.creditors[(creditor.me.inst_id, creditor.me.incarnation)]
    for move_id in moves:
        request = worker_pb2.ReleaseKvCacheRequest(
            owner_inst_id=1, owner_incarnation=source.me.incarnation, move_id=move_id
        )
        assert creditor.rmanager.creditor.release_kvcache(request).released_blocks > 0
    await eventually(lambda: source.engine.snapshot.borrowed_blocks == 0)
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    await eventually(lambda: all_free(source, creditor))


async def test_a_creditor_lost_in_a_step_is_recomputed_and_the_answer_is_whole(pair: Pair) -> None:
    source, creditor = pair
    answer = asyncio.create_task(source.generate(num_prompt=12, max_tokens=60))
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    await move(source, creditor, 2)
    await eventually(lambda: source.engine.snapshot.borrowed_blocks >= 2)
    source.runner.error = PartLost(InstId(2), "cut")
    await eventually(lambda: source.engine.snapshot.borrowed_blocks == 0)
    source.runner.error = None
    assert len(await answer) == 60
    await eventually(lambda: all_free(source, creditor))


async def test_a_cancelled_call_frees_every_block_on_both_sides(pair: Pair) -> None:
    source, creditor = pair
    answer = asyncio.create_task(source.generate(num_prompt=60, max_tokens=30))
    await eventually(lambda: source.engine.snapshot.borrowed_blocks >= 4)
    answer.cancel()
    await eventually(lambda: all_free(source, creditor))


async def test_an_order_ends_even_if_the_planner_did_not_wait(pair: Pair) -> None:
    """Otherwise the sequence would count as moving for ever, and nothing would lend or preempt."""
    source, _ = pair
    await source.submit(1, num_prompt=12, max_tokens=60)
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    source.runner.step_s = 0.3
    request = worker_pb2.MoveKvCacheRequest(
        req_id=1, num_blocks=1, dst=types_pb2.InstanceInfo(inst_id=9)
    )
    asking = asyncio.create_task(source.rmanager.move_kvcache(request))
    await asyncio.sleep(0.05)
    asking.cancel()
    source.runner.step_s = 0.01

    def is_moving(scheduler: Scheduler) -> bool:
        sequence = scheduler.find(ReqId(1))
        return sequence is not None and sequence.is_moving

    await eventually(lambda: source.mover.failed_moves >= 1)
    assert not await source.on_engine(is_moving)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_broken_engine_says_so(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process must end and be started anew, not serve on without an engine."""
    source, _ = pair
    await source.submit(1, num_prompt=12, max_tokens=60)
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    monkeypatch.setattr(source.pool, "free", lambda blocks: [][0])
    source.runner.error = ValueError("a step that fails")
    await asyncio.wait_for(asyncio.to_thread(source.engine.wait), 10)
    assert not source.engine.is_alive
    monkeypatch.undo()
