"""A beginning that was computed once is found again: here, or where it was lent to."""

from services.common.ids import InstId, ReqId
from services.worker.engine.sequence import Request
from tests.unit.worker.engine.world import BLOCK, World


def caching_world(num_blocks: int = 16, remote_blocks: int = 0, keep_s: float = 0.0) -> World:
    return World(num_blocks, remote_blocks, budget=64, is_caching=True, keep_remote_s=keep_s)


def cached_tokens(world: World, req_id: int) -> int:
    return sum(o.num_cached_tokens for o in world.outputs if o.req_id == req_id)


def test_a_second_equal_prompt_computes_only_its_last_block() -> None:
    world = caching_world()
    world.add(1, num_prompt=12, max_tokens=1)
    world.run()
    world.add(2, num_prompt=12, max_tokens=1)
    plan = world.step()
    # The last token's logits are wanted, so its block is computed again.
    assert [item.num_tokens for item in plan.items] == [BLOCK]
    assert (cached_tokens(world, 1), cached_tokens(world, 2)) == (0, 8)


def test_running_requests_share_their_beginning() -> None:
    world = caching_world()
    world.add(1, num_prompt=12, max_tokens=8)
    world.step()
    world.add(2, num_prompt=14, max_tokens=8)
    world.step()
    first, second = (seq.table.local for seq in world.scheduler.running)
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    world.run()
    assert (world.tokens_of(1), world.tokens_of(2)) == (8, 8)


def test_an_answer_is_found_again_as_the_beginning_of_the_next_turn() -> None:
    world = caching_world()
    world.add(1, num_prompt=6, max_tokens=7)
    world.run()
    turn = (*range(1, 7), *[7] * 6, 50, 51)
    world.scheduler.add(Request(ReqId(2), turn, 1), world.now_s)
    world.run()
    assert cached_tokens(world, 2) == 12


def test_other_salts_share_nothing() -> None:
    world = caching_world()
    for req_id, salt in ((1, "a"), (2, "b"), (3, "a")):
        request = Request(ReqId(req_id), tuple(range(1, 13)), 1, cache_salt=salt)
        world.scheduler.add(request, world.now_s)
        world.run()
    assert [cached_tokens(world, r) for r in (1, 2, 3)] == [0, 0, 8]


def test_cached_blocks_give_way_to_new_requests_oldest_first() -> None:
    world = caching_world(num_blocks=8)
    world.add(1, num_prompt=12, max_tokens=1)
    world.run()
    assert world.pool.num_free == 8
    other = Request(ReqId(2), tuple(range(100, 128)), 1)
    world.scheduler.add(other, world.now_s)
    world.run()
    world.add(3, num_prompt=12, max_tokens=1)
    world.run()
    assert cached_tokens(world, 3) == 4


def test_a_preempted_request_finds_its_own_blocks_again_and_counts_none_of_them() -> None:
    world = caching_world()
    world.add(1, num_prompt=12, max_tokens=4)
    world.step()
    world.scheduler.placement.lose_parts(InstId(2))
    world.run()
    assert cached_tokens(world, 1) == 0


def lend(world: World, req_id: int, num_blocks: int) -> None:
    order = world.scheduler.placement.begin_move(ReqId(req_id), num_blocks)
    assert order is not None
    assert world.carry_out(order)


def test_a_prefix_that_was_lent_is_used_in_place() -> None:
    world = caching_world(remote_blocks=8, keep_s=100.0)
    world.add(1, num_prompt=14, max_tokens=4)
    world.step()
    lend(world, 1, 2)
    # The local copies are evictable now, and gone once somebody needed the memory.
    world.pool.free(world.pool.try_allocate(world.pool.num_free) or [])
    world.add(2, num_prompt=14, max_tokens=4)
    world.step()
    first, second = world.scheduler.running
    assert first.table.remote == second.table.remote
    assert second.num_cached_tokens == 12
    world.run()
    assert sum(world.lent.values()) == 2  # kept for a while: no second copy, no second loan


def test_what_is_lent_already_is_not_copied_again() -> None:
    """A second sequence with the same local blocks lets go of them for the copy that is there."""
    world = caching_world(remote_blocks=8)
    world.add(1, num_prompt=14, max_tokens=8)
    world.step()
    world.add(2, num_prompt=14, max_tokens=8)
    world.step()
    lend(world, 1, 2)
    held = world.pool.num_free
    assert world.scheduler.placement.begin_move(ReqId(2), 2) is None
    first, second = world.scheduler.running
    assert first.table.remote == second.table.remote
    assert world.pool.num_free == held + 2
    world.run()
    assert (world.tokens_of(1), world.tokens_of(2)) == (8, 8)


def test_two_conversations_are_both_found_where_they_lie() -> None:
    world = caching_world(num_blocks=32, remote_blocks=8, keep_s=100.0)
    starts = {1: 1, 2: 500}
    for req_id, start in starts.items():
        prompt = tuple(range(start, start + 14))
        world.scheduler.add(Request(ReqId(req_id), prompt, 2), world.now_s)
        world.step()
        lend(world, req_id, 2)
        world.run()
    world.pool.free(world.pool.try_allocate(world.pool.num_free) or [])
    for req_id, start in starts.items():
        prompt = tuple(range(start, start + 14))
        world.scheduler.add(Request(ReqId(10 + req_id), prompt, 2), world.now_s)
    world.run()
    assert [cached_tokens(world, r) for r in (11, 12)] == [8, 8]


def test_a_hit_after_waiting_is_counted() -> None:
    """Being looked at in vain must not make it look like a request that was preempted."""
    world = caching_world(num_blocks=8)
    world.add(1, num_prompt=12, max_tokens=12)
    world.step()
    world.scheduler.add(Request(ReqId(2), (*range(1, 13), *range(100, 116)), 1), world.now_s)
    for _ in range(4):
        world.step()
    assert [seq.req_id for seq in world.scheduler.waiting] == [2]
    world.run()
    assert cached_tokens(world, 2) == 12


def test_an_unused_remote_prefix_goes_back_after_its_time() -> None:
    world = caching_world(remote_blocks=8, keep_s=5.0)
    world.add(1, num_prompt=14, max_tokens=2)
    world.step()
    lend(world, 1, 2)
    world.run()
    assert world.lent
    for _ in range(6):
        world.step()
    assert world.lent == {}


def test_when_creditors_refuse_unused_remote_prefixes_go_back_at_once() -> None:
    world = caching_world(remote_blocks=8, keep_s=100.0)
    world.add(1, num_prompt=14, max_tokens=2)
    world.step()
    lend(world, 1, 2)
    world.run()
    other = Request(ReqId(2), tuple(range(200, 230)), 4)
    world.scheduler.add(other, world.now_s)
    world.step()
    order = world.scheduler.placement.begin_move(ReqId(2), 1)
    assert order is not None
    world.carry_out(order, granted=0)
    world.settle()
    used = {span.move_id for seq in world.scheduler.running for span in seq.table.remote}
    assert world.lent.keys() == used


def test_a_lost_creditor_s_prefixes_are_not_found_again() -> None:
    world = caching_world(remote_blocks=8, keep_s=100.0)
    world.add(1, num_prompt=14, max_tokens=2)
    world.step()
    lend(world, 1, 2)
    world.run()
    world.scheduler.placement.lose_parts(InstId(2))
    world.pool.free(world.pool.try_allocate(world.pool.num_free) or [])
    world.add(2, num_prompt=14, max_tokens=2)
    world.run()
    assert cached_tokens(world, 2) == 0
