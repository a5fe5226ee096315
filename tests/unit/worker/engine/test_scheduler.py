import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import Overloaded
from services.common.ids import ReqId
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import FinishReason, Request
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.kvcache.block_pool import BlockPool
from tests.unit.worker.engine.world import ANOTHER, BLOCK, CREDITOR, World, request


def test_one_budget_serves_prefill_chunks_and_decodes_alike() -> None:
    world = World(num_blocks=32, budget=8)
    world.add(1, num_prompt=4)
    world.step()
    world.add(2, num_prompt=20)
    sizes = []
    for _ in range(4):
        plan = world.step()
        sizes.append([item.num_tokens for item in plan.items])
    assert sizes == [[1, 7], [1, 7], [1, 6], [1]]  # 1 finished after its fourth token


def test_a_request_ends_at_max_tokens() -> None:
    world = World()
    world.add(1, max_tokens=3)
    world.run()
    assert world.tokens_of(1) == 3
    assert world.outputs[-1].finish_reason is FinishReason.LENGTH
    assert world.pool.num_free == 8


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    world = World()
    stopping = Request(ReqId(1), (1, 2), 9, stop_token_ids=frozenset({7}))
    world.scheduler.add(stopping, 0.0)
    world.step(token=3)
    world.step(token=7)
    assert [o.token_ids for o in world.outputs] == [(3,), ()]
    assert world.outputs[-1].finish_reason is FinishReason.STOP


def test_abort_frees_everything_here_and_elsewhere() -> None:
    world = World(num_blocks=4, remote_blocks=8)
    world.add(1, num_prompt=24)
    while not world.lent:
        world.step()
        world.carry_out_all()
    assert world.scheduler.abort(ReqId(1), world.now_s)
    assert not world.scheduler.abort(ReqId(1), world.now_s)
    world.settle()
    assert (world.pool.num_free, world.lent) == (4, {})


def test_a_full_queue_refuses_early() -> None:
    scheduler = Scheduler(
        SchedulerConfig(BLOCK, 16, 8, max_waiting=1), SequenceBlocks(BlockPool(8), 0.0, True)
    )
    scheduler.add(request(1), 0.0)
    with pytest.raises(Overloaded):
        scheduler.add(request(2), 0.0)


def test_the_whole_prompt_must_fit_before_it_is_admitted() -> None:
    world = World(num_blocks=8)
    world.add(1, num_prompt=20, max_tokens=8)
    world.add(2, num_prompt=12, max_tokens=1)
    plan = world.step()
    assert [item.sequence.req_id for item in plan.items] == [1]
    world.run()
    assert world.tokens_of(2) == 1


def test_what_fits_passes_what_does_not() -> None:
    world = World(num_blocks=8)
    world.add(1, num_prompt=12, max_tokens=8)
    world.step()
    world.add(2, num_prompt=24, max_tokens=1)
    world.add(3, num_prompt=1, max_tokens=1)
    world.step()
    assert [seq.req_id for seq in world.scheduler.waiting] == [2]
    world.run()
    assert world.tokens_of(2) == world.tokens_of(3) == 1


def test_nobody_passes_a_request_whose_patience_has_ended() -> None:
    """Short ones keep coming, one a step; without an end to its patience 2 would never run."""
    world = World(num_blocks=8)
    world.add(1, num_prompt=4, max_tokens=4)
    world.step()
    world.add(2, num_prompt=27, max_tokens=1)
    for req_id in range(3, 40):
        world.add(req_id, num_prompt=4, max_tokens=4)
        world.step()
        if world.tokens_of(2):
            break
    assert world.tokens_of(2) == 1
    assert 10 < world.now_s < 25


def test_the_youngest_gives_way_and_both_finish() -> None:
    world = World(num_blocks=6, budget=32)
    world.add(1, num_prompt=8, max_tokens=12)
    world.add(2, num_prompt=4, max_tokens=12)
    preempted = 0
    for _ in range(60):
        preempted += world.step().num_preempted
    assert preempted > 0
    assert (world.tokens_of(1), world.tokens_of(2)) == (12, 12)


def test_a_step_that_preempted_admits_nobody() -> None:
    world = World(num_blocks=6, budget=32)
    world.add(1, num_prompt=8, max_tokens=12)
    world.add(2, num_prompt=4, max_tokens=12)
    for _ in range(60):
        before = {seq.req_id for seq in world.scheduler.running}
        plan = world.step()
        if plan.num_preempted:
            assert {item.sequence.req_id for item in plan.items} <= before
            return
    raise AssertionError("nothing was preempted")


def test_a_prompt_longer_than_the_pool_is_prefilled_by_lending_as_it_goes() -> None:
    world = World(num_blocks=4, remote_blocks=12, budget=8)
    world.add(1, num_prompt=48, max_tokens=6)
    world.run()
    assert world.tokens_of(1) == 6
    assert (world.pool.num_free, world.lent) == (4, {})


def test_lending_comes_before_preemption() -> None:
    world = World(num_blocks=6, remote_blocks=4, budget=32)
    world.add(1, num_prompt=8, max_tokens=12)
    world.add(2, num_prompt=4, max_tokens=12)
    for _ in range(30):
        assert world.step().num_preempted == 0
        world.carry_out_all()
    assert (world.tokens_of(1), world.tokens_of(2)) == (12, 12)


def test_the_longest_request_lends() -> None:
    world = World(num_blocks=10, remote_blocks=8, budget=64)
    world.add(1, num_prompt=8, max_tokens=20)
    world.add(2, num_prompt=20, max_tokens=20)
    while not world.orders:
        world.step()
    assert world.orders[0].req_id == 2


def test_a_refused_move_is_not_offered_again_at_once() -> None:
    world = World(num_blocks=4, remote_blocks=8, budget=8)
    world.add(1, num_prompt=24)
    while not world.orders:
        world.step()
    world.carry_out(world.orders.pop(), granted=0)
    refused_s = world.now_s
    plan = world.scheduler.schedule(refused_s + 0.1, MemoryElsewhere(world.remote_free))
    assert plan.moves == []
    assert world.scheduler.schedule(refused_s + 1.0, MemoryElsewhere(world.remote_free)).moves


def test_an_order_that_became_void_is_no_refusal() -> None:
    world = World(num_blocks=4, remote_blocks=8, budget=8)
    world.add(1, num_prompt=24)
    while not world.orders:
        world.step()
    world.scheduler.abort(ReqId(1), world.now_s)
    world.carry_out(world.orders.pop(), granted=0)
    assert world.scheduler.placement.may_lend(world.now_s)


def test_a_move_does_not_commit_after_its_sequence_gave_its_blocks_up() -> None:
    world = World(num_blocks=4, remote_blocks=8, budget=8)
    world.add(1, num_prompt=24)
    while not world.orders:
        world.step()
    world.scheduler.abort(ReqId(1), world.now_s)
    assert not world.carry_out(world.orders.pop())
    assert (world.pool.num_free, world.lent) == (4, {})


def test_a_move_does_not_commit_to_a_later_request_of_the_same_id() -> None:
    world = World(num_blocks=16, remote_blocks=8)
    placement = world.scheduler.placement
    world.add(1, num_prompt=12, max_tokens=8)
    world.step()
    late = placement.begin_move(ReqId(1), 2)
    assert late is not None
    world.scheduler.abort(ReqId(1), world.now_s)
    world.add(1, num_prompt=8, max_tokens=8)
    world.step()
    order = placement.begin_move(ReqId(1), 1)
    assert order is not None
    assert not world.carry_out(late)
    assert placement.is_current(order)
    assert world.scheduler.running[0].is_moving
    assert world.carry_out(order)
    world.run()


def test_what_cannot_go_on_ends_with_an_error_instead_of_waiting_for_ever() -> None:
    world = World(num_blocks=4, remote_blocks=8, budget=8)
    world.add(1, num_prompt=24, max_tokens=6)
    world.step()
    world.orders.clear()
    for _ in range(200):  # every creditor refuses
        world.step()
        while world.orders:
            world.carry_out(world.orders.pop(), granted=0)
    assert isinstance(world.outputs[-1].error, Overloaded)
    assert world.pool.num_free == 4


def test_who_waited_for_its_share_of_the_budget_has_not_waited_for_memory() -> None:
    world = World(num_blocks=30, remote_blocks=10, budget=3)
    world.add(1, num_prompt=12, max_tokens=30)
    for _ in range(5):
        world.step()
    order = world.scheduler.placement.begin_move(ReqId(1), 3)
    assert order is not None
    assert world.carry_out(order)
    world.add(2, num_prompt=40)
    world.add(3, num_prompt=40)
    for _ in range(4):
        world.step()
    first, _, last = world.scheduler.running
    world.lose()
    while first.holes:
        assert last not in [item.sequence for item in world.step().items]
    world.lend_to_others(world.pool.num_free)
    world.step()
    assert last in world.scheduler.running


def test_a_request_waits_no_longer_than_the_queue_allows() -> None:
    world = World(num_blocks=4)
    world.add(1, num_prompt=64)
    for _ in range(70):
        world.step()
    assert isinstance(world.outputs[-1].error, Overloaded)


def test_decodes_run_beside_a_long_prompt_in_every_step() -> None:
    world = World(num_blocks=64, budget=8)
    world.add(1, num_prompt=100, max_tokens=1)
    world.step()
    world.add(2, num_prompt=2, max_tokens=8)
    while world.tokens_of(2) < 1:
        world.step()
    for _ in range(7):
        plan = world.step()
        assert plan.items[0].sequence.req_id == 2
        assert [item.sequence.req_id for item in plan.items] == [2, 1]
        assert plan.num_tokens == 8


def test_a_short_prompt_starts_beside_a_long_one() -> None:
    world = World(num_blocks=64, budget=8)
    world.add(1, num_prompt=200, max_tokens=1)
    world.step()
    world.add(2, num_prompt=4, max_tokens=1)
    plan = world.step()
    assert [(item.sequence.req_id, item.num_tokens) for item in plan.items] == [(1, 4), (2, 4)]


def test_priorities_come_before_age() -> None:
    world = World(num_blocks=8, max_running=1)
    for req_id, priority in ((1, 0), (2, 5), (3, -1)):
        prompt = tuple(range(1, 5))
        world.scheduler.add(Request(ReqId(req_id), prompt, 1, priority=priority), 0.0)
    world.run()
    assert [output.req_id for output in world.outputs] == [3, 1, 2]


def test_the_lowest_priority_is_preempted_even_if_it_is_older() -> None:
    world = World(num_blocks=6, budget=32)
    for req_id, priority in ((1, 9), (2, 0)):
        request = Request(ReqId(req_id), (1, 2, 3, 4), 14, priority=priority)
        world.scheduler.add(request, 0.0)
    while not world.step().num_preempted:
        pass
    assert [seq.req_id for seq in world.scheduler.running] == [2]
    world.run()
    assert (world.tokens_of(1), world.tokens_of(2)) == (14, 14)


def test_whoever_was_preempted_waits_until_somebody_finished() -> None:
    """Coming back into the same shortage would only be preempted again: thrash."""
    world = World(num_blocks=6, budget=32)
    world.add(1, num_prompt=8, max_tokens=12)
    world.add(2, num_prompt=4, max_tokens=12)
    preempted = 0
    for _ in range(60):
        preempted += world.step().num_preempted
    assert preempted == 1
    assert (world.tokens_of(1), world.tokens_of(2)) == (12, 12)


CREDITORS = st.sampled_from([CREDITOR, ANOTHER])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 10)),
        st.tuples(st.just("abort"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("lose"), CREDITORS, st.just(0)),
        st.tuples(st.just("fail"), CREDITORS, st.just(0)),
        st.tuples(st.just("plan"), st.integers(1, 12), st.integers(1, 4)),
        st.tuples(st.just("move"), st.integers(0, 4), CREDITORS),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=100)
@given(
    num_blocks=st.integers(3, 10),
    remote_blocks=st.integers(0, 16),
    budget=st.integers(1, 24),
    is_caching=st.booleans(),
    keep_remote_s=st.sampled_from([0.0, 3.0]),
    events=EVENTS,
)
def test_every_block_is_accounted_for_whatever_happens(
    num_blocks: int,
    remote_blocks: int,
    budget: int,
    is_caching: bool,
    keep_remote_s: float,
    events: list[tuple[str, int, int]],
) -> None:
    """All prompts begin alike, so that with caching nearly everything is shared."""
    world = World(
        num_blocks, remote_blocks, budget, is_caching=is_caching, keep_remote_s=keep_remote_s
    )
    num_added = 0
    for kind, first, second in events:
        if kind == "add":
            num_added += 1
            world.add(num_added, first, second)
        elif kind == "abort":
            world.scheduler.abort(ReqId(first), world.now_s)
        elif kind == "lose":
            world.lose(first)
        elif kind == "fail":
            world.fail_step(first)
        elif kind == "plan":
            order = world.scheduler.placement.begin_move(ReqId(first), second)
            world.orders += [order] if order else []
        elif kind == "move" and world.orders:
            granted = min(first, world.remote_free)
            world.carry_out(world.orders.pop(0), granted, inst_id=second)
        world.settle()
        world.step()
    world.carry_out_all()
    world.run()
    world.scheduler.blocks.drop_idle_remote()
    world.settle()
    assert world.pool.num_free == num_blocks
    assert world.lent == {}
