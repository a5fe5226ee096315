"""What an owner does about its creditors all the time: renewing, noticing losses, forgetting."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.infinite_llm.v1 import worker_pb2
from services.common.ids import MoveId, ReqId
from services.worker.rmanager import clients as clients_module
from tests.unit.worker.rmanager.rig import Instance, eventually

Pair = tuple[Instance, Instance]
NUM_BLOCKS = 64


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """Leases of the owner's own last long, so does nothing that it was granted before."""
    async with (
        Instance(1, tmp_path, num_blocks=NUM_BLOCKS, lease_s=60.0) as source,
        Instance(2, tmp_path, num_blocks=NUM_BLOCKS, lease_s=1.0) as creditor,
    ):
        yield source, creditor


async def lend(source: Instance, creditor: Instance) -> None:
    await source.submit(1, num_prompt=12, max_tokens=200)
    await eventually(lambda: source.engine.snapshot.running_tokens >= 12)
    order = worker_pb2.MoveKvCacheRequest(req_id=1, num_blocks=2, dst=creditor.info)
    assert (await source.rmanager.move_kvcache(order)).accepted
    await eventually(lambda: source.engine.snapshot.borrowed_blocks == 2)


async def end(source: Instance, creditor: Instance) -> None:
    await source.on_engine(lambda s: s.abort(ReqId(1), 0.0))
    await eventually(lambda: source.pool.num_free == creditor.pool.num_free == NUM_BLOCKS)


async def test_a_shorter_lease_than_ever_is_renewed_in_time(pair: Pair) -> None:
    source, creditor = pair
    await lend(source, creditor)
    source.runner.step_s = 0.1
    await asyncio.sleep(2.5)  # leases and a half
    assert source.engine.snapshot.recomputed == 0
    assert creditor.lender.num_lent_blocks == 2
    await end(source, creditor)


async def test_a_part_that_is_gone_costs_no_connection(pair: Pair) -> None:
    """The creditor says so itself, so it is there."""
    source, creditor = pair
    await lend(source, creditor)
    channels, who = source.engine._channels, (creditor.me.inst_id, creditor.me.incarnation)
    channel = await source.on_engine(lambda _: channels.get(who))
    await asyncio.wrap_future(source.engine.lose_parts(creditor.me.inst_id, {MoveId(1)}))
    assert await source.on_engine(lambda _: channels.get(who)) is channel
    await end(source, creditor)


async def test_peers_that_are_gone_are_forgotten_once_nothing_lies_there(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, creditor = pair
    monkeypatch.setattr(clients_module, "_KEEP_S", 0.5)
    source.runner.step_s = 0.05
    await lend(source, creditor)
    await asyncio.sleep(1.5)  # some rounds
    assert [len(instance.clients._known) for instance in pair] == [1, 1]
    await end(source, creditor)
    await eventually(lambda: not any(i.clients._known or i.clients._channels for i in pair), 20.0)
