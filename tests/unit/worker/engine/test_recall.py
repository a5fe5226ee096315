"""Recalls, seen from the scheduler: what it wants back, and how it gives back what it borrowed."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.kvcache.block_table import RemoteSpan
from tests.unit.worker.engine.world import World

CREDITOR = (InstId(2), Incarnation(1))


# -- wanting back what is lent to others -----------------------------------------------------------


def short_of_memory(remote_blocks: int = 0) -> World:
    """Two sequences that fill what is left beside the blocks lent to others."""
    world = World(num_blocks=8, remote_blocks=remote_blocks)
    world.lend_to_others(4)
    world.add(1, num_prompt=3, max_tokens=12)
    world.add(2, num_prompt=3, max_tokens=12)
    for _ in range(5):
        world.step()
    assert world.pool.num_free == 0
    return world


def test_what_is_lent_is_wanted_back_before_anybody_is_preempted() -> None:
    world = short_of_memory()
    plans = [world.step() for _ in range(2)]
    assert plans[-1].num_recalled_blocks == 4
    world.others_give_back()
    plans += [world.step() for _ in range(9)]
    assert sum(plan.num_preempted for plan in plans) == 0
    assert (world.tokens_of(1), world.tokens_of(2)) == (12, 12)


def test_nobody_waits_for_ever_for_what_others_do_not_give_back() -> None:
    world = short_of_memory()
    preempted = [world.step().num_preempted for _ in range(6)]
    assert sum(preempted) == 1
    assert preempted.index(1) >= 2  # after its patience only


def test_blocks_are_lent_on_before_any_are_recalled() -> None:
    world = short_of_memory(remote_blocks=10)
    assert world.orders
    assert world.step().num_recalled_blocks == 0
    world.carry_out_all()
    world.run()
    assert (world.tokens_of(1), world.tokens_of(2)) == (12, 12)


def test_without_loans_there_is_nothing_to_want_back() -> None:
    world = short_of_memory()
    world.lent_to_others, world.reserved = [], world.lent_to_others  # as if it were never ours
    plans = [world.step() for _ in range(3)]
    assert all(plan.num_recalled_blocks == 0 for plan in plans)
    assert sum(plan.num_preempted for plan in plans) == 1


def test_no_more_is_wanted_than_is_lent() -> None:
    world = World(num_blocks=4)
    world.lend_to_others(1)
    for req_id in (1, 2, 3):
        world.add(req_id, num_prompt=3, max_tokens=20)
    world.step()
    assert max(world.step().num_recalled_blocks for _ in range(3)) == 1


def test_a_request_that_has_waited_too_long_wants_back_what_it_lacks() -> None:
    world = World(num_blocks=10)
    world.lend_to_others(8)
    world.add(1, num_prompt=20, max_tokens=2)
    while world.now_s <= world.scheduler.config.patience_s:
        assert world.step().num_recalled_blocks == 0
    assert world.step().num_recalled_blocks == 4  # six blocks, two of them free
    world.others_give_back()
    world.run()
    assert world.tokens_of(1) == 2


def test_nothing_is_recalled_that_would_not_let_the_waiting_request_in() -> None:
    world = World(num_blocks=10)
    world.lend_to_others(2)
    world.add(1, num_prompt=60, max_tokens=2)
    while world.now_s <= world.scheduler.config.patience_s + 5.0:
        assert world.step().num_recalled_blocks == 0


# -- giving back what was borrowed -----------------------------------------------------------------


def borrowing(world: World, req_id: int = 1, num_blocks: int = 3) -> RemoteSpan:
    """The first blocks of a request lie on a creditor."""
    order = world.scheduler.placement.begin_move(ReqId(req_id), num_blocks)
    assert order is not None
    assert world.carry_out(order)
    return world.scheduler.blocks.remote_spans[-1]


def test_a_recall_names_what_sequences_use_and_gives_back_what_nobody_does() -> None:
    world = World(num_blocks=12, remote_blocks=12, is_caching=True, keep_remote_s=99.0)
    world.add(1, num_prompt=16, max_tokens=1)
    world.step()
    world.step()
    assert world.lent == {}
    world.add(2, num_prompt=16, max_tokens=20)
    world.step()
    used = borrowing(world, 2)
    blocks = world.scheduler.blocks
    assert blocks.recalled(CREDITOR, {used.move_id, MoveId(99)}) == [used]
    assert blocks.recalled((InstId(2), Incarnation(9)), {used.move_id}) == []
    assert blocks.recalled((InstId(3), Incarnation(1)), {used.move_id}) == []
    world.scheduler.abort(ReqId(2), world.now_s)
    world.settle()
    assert world.lent  # kept a while for whoever begins with the same
    assert blocks.recalled(CREDITOR, {used.move_id}) == []
    world.settle()
    assert world.lent == {}
    assert blocks.recalled(CREDITOR, {used.move_id}) == []  # late, and again


def test_free_blocks_are_used_before_anybody_gives_way() -> None:
    world = World(num_blocks=10, remote_blocks=10)
    world.add(1, num_prompt=16, max_tokens=20)
    world.add(2, num_prompt=4, max_tokens=20)
    world.step()
    world.step()
    span = borrowing(world)
    blocks = world.make_room(span)
    assert blocks is not None
    assert len(world.scheduler.running) == 2
    world.step()  # which still reads the creditor's copy
    assert world.take_back(span, blocks)
    assert world.lent == {}
    assert world.scheduler.running[0].table.remote == []
    world.run()
    assert (world.tokens_of(1), world.tokens_of(2)) == (20, 20)


def test_the_youngest_gives_way_for_the_older_one_s_part() -> None:
    world = World(num_blocks=10, remote_blocks=10, budget=64)
    world.add(1, num_prompt=16, max_tokens=8)
    world.step()
    span = borrowing(world)
    world.add(2, num_prompt=23, max_tokens=4)
    world.step()
    assert world.pool.num_free < 3
    blocks = world.make_room(span)
    assert blocks is not None
    assert [seq.req_id for seq in world.scheduler.running] == [1]
    assert world.step().num_preempted == 1  # counted, and nobody is admitted in its place yet
    assert world.take_back(span, blocks)
    world.run()
    assert (world.tokens_of(1), world.tokens_of(2)) == (8, 4)


def test_who_is_the_youngest_itself_gives_its_part_up() -> None:
    world = World(num_blocks=8, remote_blocks=8, budget=64)
    world.add(1, num_prompt=20, max_tokens=4)
    world.add(2, num_prompt=8, max_tokens=4)
    world.step()
    span = borrowing(world, 2, num_blocks=2)
    world.add(3, num_prompt=4, max_tokens=9)
    world.step()
    blocks = world.make_room(span)
    assert blocks is None or world.take_back(span, blocks)
    world.run()
    assert [world.tokens_of(req_id) for req_id in (1, 2, 3)] == [4, 4, 9]


def test_nobody_gives_way_in_vain_for_a_part_that_finds_no_room_all_the_same() -> None:
    world = World(num_blocks=10, remote_blocks=10, budget=64)
    world.add(1, num_prompt=36, max_tokens=9)
    world.step()
    span = borrowing(world, num_blocks=5)
    world.add(2, num_prompt=4, max_tokens=9)
    for _ in range(6):
        world.step()
    young = world.scheduler.running[1]
    assert world.pool.num_free + len(young.table.local) < span.num_blocks
    assert world.make_room(span) is None
    assert world.scheduler.running == [young]
    world.run()
    assert (world.tokens_of(1), world.tokens_of(2)) == (9, 9)


def test_a_part_that_nobody_uses_any_more_needs_no_room() -> None:
    world = World(num_blocks=10, remote_blocks=10)
    world.add(1, num_prompt=16, max_tokens=20)
    world.step()
    span = borrowing(world)
    blocks = world.make_room(span)
    assert blocks is not None
    world.scheduler.abort(ReqId(1), world.now_s)
    world.settle()
    assert not world.take_back(span, blocks)
    assert not world.lend_on(span)
    assert world.make_room(span) is None
    assert world.pool.num_free == 10


@pytest.mark.parametrize("way", ["home", "elsewhere", "to two"])
def test_all_who_share_a_part_have_it_back_and_others_find_it(way: str) -> None:
    world = World(num_blocks=24, remote_blocks=24, budget=64, is_caching=True)
    world.add(1, num_prompt=17, max_tokens=20)
    world.step()
    world.add(2, num_prompt=17, max_tokens=20)
    world.step()
    span = borrowing(world, num_blocks=4)
    assert (
        world.scheduler.placement.begin_move(ReqId(2), 4) is None
    )  # uses the same copy from now on
    first, second = world.scheduler.running
    assert first.table.remote == second.table.remote == [span]
    if way == "home":
        blocks = world.make_room(span)
        assert blocks is not None
        assert world.take_back(span, blocks)
        assert first.table.local[:4] == second.table.local[:4] == blocks
    else:
        assert world.lend_on(span, 1 if way == "to two" else None)
        assert len(first.table.remote) == (2 if way == "to two" else 1)
        assert first.table.remote == second.table.remote != [span]
    world.add(3, num_prompt=17, max_tokens=20)
    world.step()
    assert world.scheduler.running[2].num_cached_tokens == 16
    world.run()
    assert [world.tokens_of(req_id) for req_id in (1, 2, 3)] == [20, 20, 20]
    assert world.pool.num_free == 24


def recall_something(
    world: World, random: Random, pending: list[tuple[RemoteSpan, list[int]]]
) -> None:
    spans = [s for s in world.scheduler.blocks.remote_spans if s not in dict(pending)]
    way = random.choice(["home", "elsewhere", "nothing", "nothing"])
    if not spans or way == "nothing":
        return
    span = random.choice(spans)
    if way == "elsewhere":
        world.lend_on(span, random.choice([None, 1]) if span.num_blocks > 1 else None)
    elif (blocks := world.make_room(span)) is not None:
        pending.append((span, blocks))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.booleans())
def test_whatever_is_recalled_and_when_everybody_ends_and_nothing_is_lost(
    seed: int, is_caching: bool
) -> None:
    random = Random(seed)
    world = World(num_blocks=14, remote_blocks=12, budget=24, is_caching=is_caching)
    for req_id in range(1, 7):
        world.add(req_id, num_prompt=random.randint(1, 30), max_tokens=random.randint(1, 16))
    pending: list[tuple[RemoteSpan, list[int]]] = []
    for _ in range(150):
        world.step()
        if random.random() < 0.8:
            world.carry_out_all()
        recall_something(world, random, pending)
        while pending and random.random() < 0.4:
            world.take_back(*pending.pop(0))
    while pending:
        world.take_back(*pending.pop(0))
    world.run(800)
    for request in range(1, 7):
        outputs = [output for output in world.outputs if output.req_id == request]
        assert outputs[-1].is_last
        assert outputs[-1].error is None
    assert world.lent == {}
    assert world.pool.num_free == 14
