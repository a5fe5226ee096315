"""A creditor that is lost costs the tokens that it held, and no others.

The world's KV says what it was computed from, so every step here also checks that it reads exactly
what lies before it.
"""

from services.common.errors import Overloaded
from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.engine.sequence import FinishReason, Request
from tests.unit.worker.engine.world import ANOTHER, BLOCK, CREDITOR, World


def lending_world(num_blocks: int = 16, budget: int = 64, is_caching: bool = False) -> World:
    return World(num_blocks, remote_blocks=32, budget=budget, is_caching=is_caching)


def lend(world: World, req_id: int, num_blocks: int, inst_id: int = CREDITOR) -> None:
    order = world.scheduler.placement.begin_move(ReqId(req_id), num_blocks)
    assert order is not None
    assert world.carry_out(order, inst_id=inst_id)


def chunks(world: World, num_steps: int) -> list[tuple[int, int]]:
    """Which tokens the steps compute, one running request."""
    return [(item.start, item.end) for _ in range(num_steps) for item in world.step().items]


def forget_cached(world: World) -> None:
    """Somebody else needed the memory."""
    world.pool.free(world.pool.try_allocate(world.pool.num_free) or [])


def test_only_the_lost_tokens_are_computed_again_and_the_answer_goes_on() -> None:
    world = lending_world()
    world.add(1, num_prompt=24, max_tokens=6)
    world.step()
    lend(world, 1, 2)
    lend(world, 1, 2, ANOTHER)
    world.step()
    assert world.lose() == 1
    assert chunks(world, 2) == [(0, 8), (25, 26)]
    world.run()
    assert world.scheduler.num_recomputed_tokens == 8
    assert world.tokens_of(1) == 6
    assert world.outputs[-1].finish_reason is FinishReason.LENGTH


def test_who_holds_nothing_of_it_costs_nothing() -> None:
    world = lending_world()
    world.add(1, num_prompt=24)
    world.step()
    lend(world, 1, 2)
    assert world.lose(ANOTHER) == 0
    assert world.scheduler.placement.lose_parts(InstId(CREDITOR), [MoveId(99)]) == 0
    assert chunks(world, 1) == [(24, 25)]


def test_what_a_creditor_lent_since_it_was_started_anew_is_not_lost_with_the_rest() -> None:
    world = lending_world()
    world.add(1, num_prompt=24)
    world.step()
    lend(world, 1, 2)
    placement, now = world.scheduler.placement, Incarnation(1)
    assert placement.lose_parts(InstId(CREDITOR), incarnation=Incarnation(9)) == 0
    assert placement.lose_parts(InstId(CREDITOR), incarnation=now) == 1


def test_a_hole_is_computed_from_what_lies_before_it_alone() -> None:
    world = lending_world()
    world.add(1, num_prompt=40)
    world.step()
    for inst_id in (ANOTHER, CREDITOR, ANOTHER):
        lend(world, 1, 2, inst_id)
    world.lose()
    (item,) = world.step().items
    context = item.sequence.table.context(item.end)
    assert (item.start, item.end) == (8, 16)
    assert [span.num_blocks for span in context.remote] == [2]
    assert len(context.local) == 2


def test_several_holes_are_filled_oldest_first_and_nothing_is_sampled_before() -> None:
    world = lending_world(budget=6)
    world.add(1, num_prompt=32, max_tokens=4)
    while not world.tokens_of(1):
        world.step()
    for inst_id in (CREDITOR, ANOTHER, CREDITOR, 4):
        lend(world, 1, 1, inst_id)
    world.lose(CREDITOR)
    world.lose(ANOTHER)
    # Holes that touch are one: a chunk needs no regard for who held what.
    assert chunks(world, 2) == [(0, 6), (6, 12)]
    assert world.tokens_of(1) == 1
    world.lose(4)
    assert chunks(world, 2) == [(12, 16), (32, 33)]
    assert world.tokens_of(1) == 2


def test_a_loss_during_the_recomputation_adds_its_own_tokens_only() -> None:
    world = lending_world(budget=6)
    world.add(1, num_prompt=24, max_tokens=4)
    while not world.tokens_of(1):
        world.step()
    lend(world, 1, 2, ANOTHER)
    lend(world, 1, 2, CREDITOR)
    world.lose(CREDITOR)
    assert chunks(world, 1) == [(8, 14)]
    world.lose(ANOTHER)
    assert chunks(world, 4) == [(0, 6), (6, 8), (14, 16), (24, 25)]
    assert world.scheduler.num_recomputed_tokens == 16


def test_a_step_that_fails_during_the_recomputation_is_run_again() -> None:
    world = lending_world(budget=6)
    world.add(1, num_prompt=24, max_tokens=4)
    while not world.tokens_of(1):
        world.step()
    lend(world, 1, 2, ANOTHER)
    lend(world, 1, 2, CREDITOR)
    world.lose(CREDITOR)
    world.fail_step(ANOTHER)
    assert chunks(world, 4) == [(0, 6), (6, 12), (12, 16), (24, 25)]
    world.run()
    assert world.tokens_of(1) == 4


def test_blocks_of_a_failed_step_are_used_by_the_chunk_that_runs_into_them() -> None:
    world = lending_world(budget=64)
    world.add(1, num_prompt=24)
    world.step()
    lend(world, 1, 2, ANOTHER)
    lend(world, 1, 2, CREDITOR)
    world.lose(CREDITOR)
    world.fail_step(ANOTHER)
    assert chunks(world, 2) == [(0, 16), (24, 25)]


def test_a_prompt_that_loses_its_beginning_is_prefilled_on_afterwards() -> None:
    world = lending_world(budget=8)
    world.add(1, num_prompt=24, max_tokens=1)
    world.step()
    lend(world, 1, 2)
    world.step()
    world.lose()
    assert chunks(world, 2) == [(0, 8), (16, 24)]
    assert world.tokens_of(1) == 1


def test_a_move_under_way_commits_although_an_earlier_part_was_lost() -> None:
    world = lending_world()
    world.add(1, num_prompt=24, max_tokens=6)
    world.step()
    lend(world, 1, 2)
    order = world.scheduler.placement.begin_move(ReqId(1), 2)
    assert order is not None
    world.lose()
    world.step()
    assert world.carry_out(order, inst_id=ANOTHER)
    (sequence,) = world.scheduler.running
    assert [span.inst_id for span in sequence.table.remote] == [ANOTHER]
    world.run()
    assert world.scheduler.num_recomputed_tokens == 8
    assert world.tokens_of(1) == 6


def test_a_hole_larger_than_the_free_memory_is_filled_by_lending_what_follows_it() -> None:
    world = World(num_blocks=6, remote_blocks=32, budget=8)
    world.add(1, num_prompt=48, max_tokens=6)
    while world.tokens_of(1) < 2:
        world.step()
        world.carry_out_all()
    held = sum(world.lent.values())
    world.lose()
    world.run()
    assert world.scheduler.num_recomputed_tokens == held * BLOCK
    assert world.tokens_of(1) == 6


def test_a_block_that_is_computed_again_only_in_part_does_not_move() -> None:
    world = lending_world(budget=6)
    world.add(1, num_prompt=24, max_tokens=4)
    while not world.tokens_of(1):
        world.step()
    lend(world, 1, 3)
    world.lose()
    assert chunks(world, 1) == [(0, 6)]
    order = world.scheduler.placement.begin_move(ReqId(1), 3)
    assert order is not None
    assert len(order.block_ids) == 1
    assert world.carry_out(order)
    assert chunks(world, 1) == [(6, 12)]
    world.run()
    assert world.tokens_of(1) == 4


def test_what_several_requests_have_lost_is_computed_once() -> None:
    world = lending_world(num_blocks=32, budget=16, is_caching=True)
    for req_id in (1, 2, 3):
        tail = range(100 * req_id, 100 * req_id + 4)
        prompt = (*range(1, 17), *tail)
        world.scheduler.add(Request(ReqId(req_id), prompt, 12), world.now_s)
        while not world.tokens_of(req_id):
            world.step()
    lend(world, 1, 4)
    assert world.scheduler.placement.begin_move(ReqId(2), 4) is None  # there already
    assert world.scheduler.placement.begin_move(ReqId(3), 4) is None
    forget_cached(world)
    assert world.lose() == 3
    world.run()
    assert world.scheduler.num_recomputed_tokens == 16
    assert [world.tokens_of(req_id) for req_id in (1, 2, 3)] == [12, 12, 12]


def test_what_is_still_cached_here_is_not_computed_again() -> None:
    world = lending_world(is_caching=True)
    world.add(1, num_prompt=24, max_tokens=6)
    world.step()
    lend(world, 1, 3)
    assert world.lose() == 1
    assert chunks(world, 1) == [(24, 25)]
    assert world.scheduler.num_recomputed_tokens == 0


def test_what_is_cached_behind_a_gap_is_found_when_the_gap_is_filled() -> None:
    world = lending_world(is_caching=True, budget=6)
    world.add(1, num_prompt=24, max_tokens=4)
    while not world.tokens_of(1):
        world.step()
    lend(world, 1, 1)
    lend(world, 1, 3)
    # The first block was let go of first, so its memory is taken first.
    world.pool.free(world.pool.try_allocate(world.pool.num_free - 3) or [])
    world.lose()
    # Only whole blocks are found, so from a chunk's end that falls on one.
    assert chunks(world, 3) == [(0, 6), (6, 12), (24, 25)]


def test_a_hole_that_was_filled_is_found_by_others_again() -> None:
    world = lending_world(is_caching=True)
    world.add(1, num_prompt=24, max_tokens=6)
    world.step()
    lend(world, 1, 3)
    forget_cached(world)
    world.lose()
    world.step()
    world.add(2, num_prompt=24, max_tokens=1)
    world.run()
    assert sum(o.num_cached_tokens for o in world.outputs if o.req_id == 2) == 20


def test_a_request_with_holes_ends_without_a_trace() -> None:
    world = lending_world(budget=6)
    world.add(1, num_prompt=24)
    while not world.tokens_of(1):
        world.step()
    lend(world, 1, 2)
    lend(world, 1, 2, ANOTHER)
    world.lose()
    world.step()
    assert world.scheduler.abort(ReqId(1), world.now_s)
    world.settle()
    assert (world.pool.num_free, world.lent) == (16, {})


def test_a_request_with_holes_is_preempted_like_any_other() -> None:
    world = World(num_blocks=8, remote_blocks=0, budget=64)
    world.add(1, num_prompt=8, max_tokens=18)
    world.add(2, num_prompt=12, max_tokens=12)
    world.step()
    world.remote_blocks = 3
    lend(world, 2, 2)
    world.remote_blocks = 0
    world.lose()
    preempted = 0
    for _ in range(60):
        preempted += world.step().num_preempted
    assert preempted > 0
    assert (world.tokens_of(1), world.tokens_of(2)) == (18, 12)


def test_a_hole_for_which_there_is_no_memory_at_all_ends_with_an_error() -> None:
    world = World(num_blocks=4, remote_blocks=8, budget=8)
    world.add(1, num_prompt=24, max_tokens=6)
    while world.tokens_of(1) < 1:
        world.step()
        world.carry_out_all()
    world.remote_blocks = 0
    world.lose()
    for _ in range(100):
        world.step()
    assert isinstance(world.outputs[-1].error, Overloaded)
    assert world.pool.num_free == 4
