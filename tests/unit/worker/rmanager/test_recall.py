"""A creditor wants its memory back: elsewhere, home, or given up; and every way to fail."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from protos.infinite_llm.v1 import worker_pb2, worker_pb2_grpc
from services.common.errors import PartLost
from services.common.ids import InstId, ReqId
from services.worker.engine.scheduler import Scheduler
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.kvcache.lending import Grant
from services.worker.rank import Rank
from tests.unit.worker.rmanager.rig import BLOCK, Instance, eventually
from tests.unit.worker.rmanager.test_moves import all_free, move

NUM_PROMPT, NUM_NEW = 24, 40
STEP_S = 0.005
REQ = ReqId(1)


class Trio:
    """An owner with one request that lent its first blocks, and two instances that could lend."""

    def __init__(self, owner: Instance, creditor: Instance, other: Instance) -> None:
        self.owner = owner
        self.creditor = creditor
        self.other = other
        self.others: tuple[Instance, ...] = ()

    @property
    def all(self) -> tuple[Instance, ...]:
        return (self.owner, self.creditor, self.other, *self.others)

    async def lend(self, num_blocks: int = 4, max_tokens: int = NUM_NEW) -> asyncio.Task[list[int]]:
        answer = asyncio.create_task(self.owner.generate(NUM_PROMPT, max_tokens))
        await eventually(lambda: self.owner.engine.snapshot.running_tokens >= NUM_PROMPT)
        assert await move(self.owner, self.creditor, num_blocks)
        await eventually(lambda: self.creditor.lender.num_lent_blocks >= num_blocks)
        await eventually(lambda: self.owner.engine.snapshot.borrowed_blocks >= num_blocks)
        return answer

    async def recall(self, **fields: object) -> worker_pb2.RecallKvCacheResponse:
        """The creditor's call, over gRPC."""
        values: dict[str, object] = {
            "creditor_inst_id": self.creditor.me.inst_id,
            "creditor_incarnation": self.creditor.me.incarnation,
            "owner_incarnation": self.owner.me.incarnation,
            "move_ids": [grant.move_id for grant in self.creditor.lender.recall(99)],
            "creditor_data_address": self.creditor.me.data_address,
        }
        request = worker_pb2.RecallKvCacheRequest(**(values | fields))  # type: ignore[arg-type]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.owner.port}") as channel:
            stub: worker_pb2_grpc.RManagerAsyncStub = worker_pb2_grpc.RManagerStub(channel)
            return await stub.RecallKvCache(request, timeout=5)

    async def assert_kv_is_right(self) -> None:
        """Every full block of the request holds its tokens, wherever it lies."""

        def blocks(scheduler: Scheduler) -> list[tuple[int, list[float]]]:
            sequence = scheduler.find(REQ)
            assert sequence is not None
            found, first = [], 0
            for span in sequence.table.remote:
                holder = next(i for i in self.all if i.me.inst_id == span.inst_id)
                part = holder.lender.open_part(
                    self.owner.me.inst_id, self.owner.me.incarnation, (span.move_id,)
                )
                for block_id in part.block_ids:
                    found.append((first, holder.storage.pool[block_id, 0, 0, 0, :, 0].tolist()))
                    first += 1
            for block_id in sequence.table.local[: NUM_PROMPT // BLOCK - first]:
                found.append((first, self.owner.storage.pool[block_id, 0, 0, 0, :, 0].tolist()))
                first += 1
            return found

        found = await self.owner.on_engine(blocks)
        assert isinstance(found, list)
        assert len(found) >= NUM_PROMPT // BLOCK
        for index, values in found:
            assert values == [float(100 + index * BLOCK + offset) for offset in range(BLOCK)]

    async def assert_undisturbed(self, answer: asyncio.Task[list[int]]) -> None:
        assert await answer == [7] * NUM_NEW
        assert self.owner.engine.snapshot.preemptions == 0
        assert self.owner.engine.snapshot.recomputed == 0
        await eventually(lambda: all_free(*self.all))


def num_local(instance: Instance) -> int:
    return sum(instance.engine.snapshot.local_blocks.values())


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Trio]:
    async with (
        Instance(1, tmp_path, num_blocks=32, lease_s=2.0) as owner,
        Instance(2, tmp_path, num_blocks=16, lease_s=2.0) as creditor,
        Instance(3, tmp_path, num_blocks=16, lease_s=2.0) as other,
    ):
        owner.runner.step_s = STEP_S
        yield Trio(owner, creditor, other)


async def test_a_recalled_part_comes_home_where_nobody_else_lends(trio: Trio) -> None:
    answer = await trio.lend()
    assert (await trio.recall()).accepted
    await eventually(lambda: trio.owner.engine.snapshot.borrowed_blocks == 0)
    await eventually(lambda: all_free(trio.creditor))
    await trio.assert_kv_is_right()
    assert trio.owner.retriever.taken_back_blocks == 4
    await trio.assert_undisturbed(answer)


async def test_a_recalled_part_goes_to_another_creditor_with_room(trio: Trio) -> None:
    answer = await trio.lend()
    trio.owner.meet(trio.creditor, trio.other)
    assert (await trio.recall()).accepted
    await eventually(lambda: all_free(trio.creditor))
    assert trio.other.lender.num_lent_blocks == 4
    await trio.assert_kv_is_right()
    assert trio.owner.retriever.lent_on_blocks == 4
    await trio.assert_undisturbed(answer)


async def test_a_part_for_which_nobody_has_room_alone_goes_to_several(
    trio: Trio, tmp_path: Path
) -> None:
    async with (
        Instance(4, tmp_path, num_blocks=4, lease_s=2.0) as first,
        Instance(5, tmp_path, num_blocks=3, lease_s=2.0) as second,
    ):
        answer = await trio.lend(4)
        trio.others = (first, second)
        trio.owner.meet(first, second)
        assert (await trio.recall()).accepted
        await eventually(lambda: trio.creditor.lender.num_lent_blocks == 0)
        assert (first.lender.num_lent_blocks, second.lender.num_lent_blocks) == (3, 1)
        await trio.assert_kv_is_right()
        assert trio.owner.retriever.lent_on_blocks == 4
        await trio.assert_undisturbed(answer)


async def test_a_creditor_that_dies_meanwhile_costs_only_the_detour(trio: Trio) -> None:
    """It grants, but takes no block: the part comes home."""
    answer = await trio.lend()
    trio.owner.meet(trio.creditor, trio.other)
    await asyncio.to_thread(trio.other.creditor.stop)
    assert (await trio.recall()).accepted
    await eventually(lambda: trio.owner.retriever.taken_back_blocks == 4)
    await trio.assert_kv_is_right()
    await trio.assert_undisturbed(answer)


async def test_a_part_that_is_shared_comes_home_for_all_who_read_it(trio: Trio) -> None:
    answer = await trio.lend()
    second = asyncio.create_task(trio.owner.generate(NUM_PROMPT, 30, req_id=2))
    await eventually(lambda: trio.owner.engine.snapshot.num_running == 2)
    assert (await trio.recall()).accepted
    await eventually(lambda: trio.owner.engine.snapshot.borrowed_blocks == 0)
    await trio.assert_kv_is_right()
    assert trio.owner.pool.num_free <= 32 - 4  # held once, by both
    assert await second == [7] * 30
    await trio.assert_undisturbed(answer)


async def test_a_recall_that_is_repeated_changes_nothing(trio: Trio) -> None:
    answer = await trio.lend()
    trio.owner.runner.step_s = 0.05
    move_ids = [grant.move_id for grant in trio.creditor.lender.recall(99)]
    answers = await asyncio.gather(*(trio.recall(move_ids=move_ids) for _ in range(4)))
    assert answers[0].accepted
    trio.owner.runner.step_s = STEP_S
    await eventually(lambda: trio.owner.engine.snapshot.borrowed_blocks == 0)
    late = await trio.recall(move_ids=move_ids)
    assert not late.accepted
    assert "in use" in late.reason
    assert trio.owner.retriever.taken_back_blocks == 4
    await trio.assert_undisturbed(answer)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"owner_incarnation": 3}, "earlier start"),
        ({"creditor_incarnation": 3}, "in use"),
        ({"creditor_inst_id": 3}, "in use"),
        ({"move_ids": [12345]}, "in use"),
        ({"move_ids": []}, "in use"),
    ],
)
async def test_a_recall_of_what_is_not_lent_is_refused(
    trio: Trio, change: dict[str, object], reason: str
) -> None:
    answer = await trio.lend()
    refused = await trio.recall(**change)
    assert not refused.accepted
    assert reason in refused.reason
    assert trio.creditor.lender.num_lent_blocks == 4
    await trio.assert_undisturbed(answer)


async def test_a_creditor_that_cannot_be_read_keeps_what_it_has_until_it_asks_again(
    trio: Trio,
) -> None:
    answer = await trio.lend()
    trio.owner.runner.step_s = 0.03
    assert (await trio.recall(creditor_data_address="unix:/nowhere")).accepted
    await eventually(lambda: not trio.owner.retriever._under_way)
    assert trio.owner.retriever.taken_back_blocks == 0
    assert trio.owner.engine.snapshot.borrowed_blocks == 4
    # What was taken for it is free again.
    await eventually(lambda: trio.owner.pool.num_free + num_local(trio.owner) == 32)
    assert (await trio.recall()).accepted
    await eventually(lambda: trio.owner.engine.snapshot.borrowed_blocks == 0)
    await trio.assert_kv_is_right()
    await trio.assert_undisturbed(answer)


async def test_a_request_that_ends_meanwhile_takes_nothing_back(trio: Trio) -> None:
    answer = await trio.lend()
    trio.owner.runner.step_s = 0.1
    recalling = asyncio.create_task(trio.recall())
    answer.cancel()
    await asyncio.gather(answer, recalling, return_exceptions=True)
    await eventually(lambda: all_free(*trio.all))
    await eventually(lambda: not trio.owner.retriever._under_way)
    assert all_free(*trio.all)


async def test_without_room_the_youngest_request_gives_way_first(trio: Trio) -> None:
    """The oldest keeps what it has computed; the youngest computes again when there is room."""
    answer = await trio.lend(num_blocks=5)
    young = asyncio.create_task(trio.owner.generate(100, 20, req_id=2))
    await eventually(lambda: trio.owner.pool.num_free < 5)
    assert (await trio.recall()).accepted
    await eventually(lambda: trio.owner.retriever.taken_back_blocks == 5)
    await trio.assert_kv_is_right()
    assert trio.owner.engine.snapshot.preemptions == 1
    assert await answer == [7] * NUM_NEW
    assert await young == [7] * 20
    await eventually(lambda: all_free(*trio.all))


async def test_a_request_without_room_is_given_up_and_computed_again(tmp_path: Path) -> None:
    """Alone, and too long for its own instance: it waits until somebody lends again."""
    async with (
        Instance(1, tmp_path, num_blocks=8, lease_s=2.0) as owner,
        Instance(2, tmp_path, num_blocks=32, lease_s=2.0) as creditor,
    ):
        owner.meet(creditor)
        trio = Trio(owner, creditor, creditor)
        answer = asyncio.create_task(owner.generate(60, 30))
        await eventually(lambda: owner.engine.snapshot.borrowed_blocks >= 10)
        assert (await trio.recall()).accepted
        await eventually(lambda: owner.engine.snapshot.preemptions >= 1)
        await eventually(lambda: creditor.lender.num_lent_blocks == 0)
        await asyncio.sleep(0)
        owner.meet(creditor)
        assert await answer == [7] * 30
        await eventually(lambda: all_free(owner, creditor))


async def test_a_creditor_short_of_memory_has_its_blocks_back_and_preempts_nobody(
    trio: Trio,
) -> None:
    answer = await trio.lend(num_blocks=5)
    trio.owner.runner.step_s = 0.03
    trio.creditor.runner.step_s = STEP_S
    assert trio.creditor.pool.num_free == 11
    assert await trio.creditor.generate(num_prompt=20, max_tokens=36, req_id=9) == [7] * 36
    assert trio.creditor.engine.snapshot.preemptions == 0
    assert trio.owner.retriever.taken_back_blocks == 5
    trio.owner.runner.step_s = STEP_S
    await trio.assert_undisturbed(answer)


async def test_after_a_recall_the_same_blocks_are_not_lent_at_once_again(trio: Trio) -> None:
    answer = await trio.lend(num_blocks=5)
    trio.creditor.recaller.recall(1, None)
    await eventually(lambda: all_free(trio.creditor))
    assert await move(trio.owner, trio.creditor, 2)
    await eventually(lambda: trio.owner.mover.failed_moves == 1)
    assert all_free(trio.creditor)
    await trio.assert_undisturbed(answer)


async def test_recalls_are_asked_for_a_few_times_a_second_at_most(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await trio.lend()
    asked: list[int] = []

    def recall(num_blocks: int, claimant: Rank | None) -> list[Grant]:
        asked.append(num_blocks)
        return []

    monkeypatch.setattr(trio.creditor.lender, "recall", recall)
    for _ in range(20):
        trio.creditor.recaller.recall(2, None)
    assert asked == [2]
    await trio.assert_undisturbed(answer)


async def test_an_owner_that_is_gone_holds_up_nobody(trio: Trio) -> None:
    answer = await trio.lend()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    await trio.owner.server.stop(None)
    trio.creditor.rmanager.creditor.recall_all()
    await eventually(lambda: all_free(trio.creditor))  # the lease ends it, if nothing else does


async def test_a_part_lost_while_it_is_recalled_is_computed_again(trio: Trio) -> None:
    answer = await trio.lend()
    span_of = await trio.owner.on_engine(lambda s: s.blocks.remote_spans[0])
    assert isinstance(span_of, RemoteSpan)
    trio.owner.runner.error = PartLost(InstId(2), "cut")
    recalled = asyncio.create_task(trio.recall())
    await eventually(lambda: trio.owner.engine.snapshot.recomputed >= 1)
    trio.owner.runner.error = None
    await recalled
    assert await answer == [7] * NUM_NEW
    await eventually(lambda: all_free(*trio.all))
