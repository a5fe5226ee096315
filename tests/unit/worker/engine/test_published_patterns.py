"""Ways in which schedulers of serving engines are known to hang, starve or thrash, replayed.

Each test names the pattern; the pool is tiny so that it is reached in a few steps.
"""

from services.common.errors import Overloaded
from services.common.ids import ReqId
from services.worker.engine.sequence import Request
from tests.unit.worker.engine.world import World


def request_of(req_id: int, first_token: int, num_prompt: int, max_tokens: int) -> Request:
    prompt = tuple(range(first_token, first_token + num_prompt))
    return Request(ReqId(req_id), prompt, max_tokens)


def test_partial_holders_do_not_wait_for_each_other() -> None:
    """Two chunked prefills each hold half of the pool and need more: somebody must give way."""
    world = World(num_blocks=7, budget=8)
    world.add(1, num_prompt=16, max_tokens=4)
    world.add(2, num_prompt=16, max_tokens=4)
    world.run(max_steps=60)
    assert (world.tokens_of(1), world.tokens_of(2)) == (4, 4)


def test_partial_holders_on_creditors_do_not_wait_for_each_other() -> None:
    """The same with lent memory: what one waits for, the other holds elsewhere."""
    world = World(num_blocks=4, remote_blocks=6, budget=8)
    world.add(1, num_prompt=30, max_tokens=4)
    world.add(2, num_prompt=30, max_tokens=4)
    world.run(max_steps=200)
    assert (world.tokens_of(1), world.tokens_of(2)) == (4, 4)


def test_a_request_longer_than_the_budget_is_prefilled_in_chunks() -> None:
    world = World(num_blocks=16, budget=3)
    world.add(1, num_prompt=40, max_tokens=2)
    world.run(max_steps=40)
    assert world.tokens_of(1) == 2


def test_a_request_that_can_never_fit_ends_with_an_error_and_blocks_nobody_for_ever() -> None:
    world = World(num_blocks=4)
    world.add(1, num_prompt=100)
    for _ in range(30):
        world.step()
    world.add(2, num_prompt=4, max_tokens=2)
    world.run(max_steps=100)
    assert isinstance(world.outputs[0].error, Overloaded)
    assert world.tokens_of(2) == 2


def test_a_request_that_outgrows_everything_ends_with_an_error() -> None:
    """Its prompt fits, its answer does not: nothing else is there to preempt."""
    world = World(num_blocks=4)
    world.add(1, num_prompt=12, max_tokens=100)
    world.run(max_steps=200)
    assert isinstance(world.outputs[-1].error, Overloaded)
    assert world.pool.num_free == 4


def test_a_preempted_request_keeps_its_place_in_the_queue() -> None:
    world = World(num_blocks=6, budget=32)
    world.add(1, num_prompt=8, max_tokens=12)
    world.add(2, num_prompt=4, max_tokens=12)
    while not world.step().num_preempted:
        pass
    world.add(3, num_prompt=1, max_tokens=1)
    assert [seq.req_id for seq in world.scheduler.waiting] == [2, 3]


def test_many_long_answers_do_not_thrash() -> None:
    """More growth than memory: every preemption must be paid for by somebody finishing."""
    world = World(num_blocks=12, budget=32)
    for req_id in range(1, 7):
        world.scheduler.add(request_of(req_id, 1000 * req_id, 4, 24), 0.0)
    computed = preempted = 0
    while world.scheduler.running or world.scheduler.waiting:
        plan = world.step()
        computed += plan.num_tokens
        preempted += plan.num_preempted
    assert all(world.tokens_of(req_id) == 24 for req_id in range(1, 7))
    needed = 6 * (4 + 24 - 1)
    # Without the hold on admission this workload computes most tokens twice.
    assert computed < 1.5 * needed
    assert preempted <= 5


def test_arriving_short_prompts_do_not_starve_a_long_one() -> None:
    world = World(num_blocks=64, budget=8)
    world.add(1, num_prompt=120, max_tokens=1)
    for req_id in range(2, 60):
        world.step()
        world.add(req_id, num_prompt=6, max_tokens=1)
        if world.tokens_of(1):
            break
    assert world.tokens_of(1) == 1


def test_a_long_prompt_does_not_starve_decodes_that_run() -> None:
    world = World(num_blocks=64, budget=8)
    world.add(1, num_prompt=2, max_tokens=30)
    world.step()
    world.add(2, num_prompt=150, max_tokens=1)
    for step in range(2, 20):
        world.step()
        assert world.tokens_of(1) == step


def test_admission_recovers_when_everything_was_freed() -> None:
    world = World(num_blocks=6, budget=32)
    world.add(1, num_prompt=8, max_tokens=12)
    world.add(2, num_prompt=4, max_tokens=12)
    while not world.step().num_preempted:
        pass
    for req_id in (1, 2):
        world.scheduler.abort(ReqId(req_id), world.now_s)
    world.add(3, num_prompt=8, max_tokens=2)
    world.run(max_steps=5)
    assert world.tokens_of(3) == 2
