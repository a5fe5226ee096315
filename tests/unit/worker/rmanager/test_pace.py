"""Planned moves go piece by piece between steps; where memory is short nothing waits."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.infinite_llm.v1 import types_pb2, worker_pb2
from services.common.ids import ReqId
from services.worker.engine.scheduler import Scheduler
from services.worker.rmanager.block_copy import BlockCopy
from services.worker.rmanager.pace import Pace
from tests.unit.worker.rmanager.rig import BLOCK, Instance, eventually

Sent = list[tuple[int, int]]
ONE_BLOCK = Pace.of(BLOCK, BLOCK)


@given(tokens=st.integers(1, 4096), block_size=st.sampled_from([16, 32, 64, 128]))
@settings(deadline=None)
def test_a_pace_is_never_faster_than_asked_nor_much_slower(tokens: int, block_size: int) -> None:
    pace = Pace.of(tokens, block_size)
    asked, moved = pace.steps_per_piece * tokens, pace.blocks_per_piece * block_size
    assert moved <= asked < 2 * moved


def test_sixteen_tokens_a_step_are_one_block() -> None:
    assert Pace.of(16, 16) == Pace(blocks_per_piece=1, steps_per_piece=1)
    assert Pace.of(32, 16) == Pace(blocks_per_piece=2, steps_per_piece=1)
    assert Pace.of(16, 64) == Pace(blocks_per_piece=1, steps_per_piece=4)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The pieces, each with the number of blocks that were left before it."""
    pieces: Sent = []
    send = BlockCopy.send

    def record(copy: BlockCopy, num_blocks: int) -> None:
        left = copy.num_left
        send(copy, num_blocks)
        pieces.append((left - copy.num_left, left))

    monkeypatch.setattr(BlockCopy, "send", record)
    return pieces


async def order(source: Instance, creditor: Instance, num_blocks: int) -> None:
    info = types_pb2.InstanceInfo(
        inst_id=creditor.me.inst_id,
        incarnation=creditor.me.incarnation,
        control_address=creditor.view.control_address,
        data_address=creditor.me.data_address,
        block_size=BLOCK,
    )
    request = worker_pb2.MoveKvCacheRequest(req_id=1, num_blocks=num_blocks, dst=info)
    assert (await source.rmanager.move_kvcache(request)).accepted


async def test_a_planned_move_sends_one_piece_after_a_step(tmp_path: Path, sent: Sent) -> None:
    async with (
        Instance(1, tmp_path, num_blocks=512, lease_s=5.0, pace=ONE_BLOCK) as source,
        Instance(2, tmp_path, num_blocks=64, lease_s=5.0) as creditor,
    ):
        await source.submit(1, num_prompt=8 * BLOCK, max_tokens=1000)
        await eventually(lambda: source.engine.snapshot.running_tokens >= 8 * BLOCK)
        before = source.engine.snapshot.steps
        await order(source, creditor, 6)
        await eventually(lambda: source.engine.snapshot.borrowed_blocks == 6)
        assert sent == [(1, left) for left in (6, 5, 4, 3, 2, 1)]
        assert source.engine.snapshot.steps - before >= 6
        await source.on_engine(lambda s: s.abort(ReqId(1), 0.0))


async def test_a_planned_move_hurries_where_memory_is_short(tmp_path: Path, sent: Sent) -> None:
    async with (
        Instance(1, tmp_path, num_blocks=9, lease_s=5.0, pace=ONE_BLOCK) as source,
        Instance(2, tmp_path, num_blocks=64, lease_s=5.0) as creditor,
    ):
        # Nobody is known who lends, so the scheduler itself moves nothing.
        await source.submit(1, num_prompt=9 * BLOCK - 1, max_tokens=1000)
        await eventually(lambda: source.engine.snapshot.running_tokens >= 9 * BLOCK - 1)
        await order(source, creditor, 6)
        await eventually(lambda: source.engine.snapshot.borrowed_blocks == 6)
        assert sent == [(6, 6)]
        await source.on_engine(lambda s: s.abort(ReqId(1), 0.0))


async def test_a_planned_move_ends_where_its_request_does(tmp_path: Path, sent: Sent) -> None:
    async with (
        Instance(1, tmp_path, num_blocks=512, lease_s=5.0, pace=ONE_BLOCK) as source,
        Instance(2, tmp_path, num_blocks=64, lease_s=5.0) as creditor,
    ):
        await source.submit(1, num_prompt=30 * BLOCK, max_tokens=1000)
        await eventually(lambda: source.engine.snapshot.running_tokens >= 30 * BLOCK)
        await order(source, creditor, 25)
        await eventually(lambda: len(sent) >= 2)
        await source.on_engine(lambda s: s.abort(ReqId(1), 0.0))
        await eventually(lambda: source.mover.failed_moves == 1)
        assert len(sent) < 25
        await eventually(lambda: creditor.pool.num_free == creditor.pool.num_blocks)


async def test_a_reservation_does_not_end_while_steps_are_waited_for(
    tmp_path: Path, sent: Sent
) -> None:
    async with (
        Instance(1, tmp_path, num_blocks=512, lease_s=0.5, pace=Pace(1, 100)) as source,
        Instance(2, tmp_path, num_blocks=64, lease_s=0.5) as creditor,
    ):
        await source.submit(1, num_prompt=4 * BLOCK, max_tokens=1000)
        await eventually(lambda: source.engine.snapshot.running_tokens >= 4 * BLOCK)
        await order(source, creditor, 3)
        await eventually(lambda: source.mover.moved_blocks + source.mover.failed_moves > 0)
        assert sent == [(1, 3), (1, 2), (1, 1)]
        await source.on_engine(lambda s: s.abort(ReqId(1), 0.0))


async def test_a_planned_move_that_waits_its_turn_holds_up_nothing_urgent(tmp_path: Path) -> None:
    async with (
        Instance(1, tmp_path, num_blocks=512, lease_s=5.0, pace=ONE_BLOCK) as source,
        Instance(2, tmp_path, num_blocks=64, lease_s=5.0) as creditor,
    ):
        for req_id in (1, 2):
            await source.submit(req_id, num_prompt=12, max_tokens=400)
        await eventually(lambda: source.engine.snapshot.running_tokens >= 24)
        async with source.mover._one_planned:  # as while another one copies at its pace
            await order(source, creditor, 2)
            assert not await source.on_engine(lambda s: s.placement.is_moving)
        await eventually(lambda: source.mover.moved_blocks == 2)
        for request in (ReqId(1), ReqId(2)):
            await source.on_engine(partial(Scheduler.abort, req_id=request, now_s=0.0))
