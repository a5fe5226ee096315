"""Age order over a whole cluster: who takes memory from whom, and that nobody waits in a circle."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import ReqId
from services.worker.engine.sequence import Request
from services.worker.rank import Rank
from tests.unit.worker.engine.cluster_world import BLOCK, TICK_S, ClusterWorld, Node

#: The oldest may wait for its patience, for messages and for recalls, but never for the others.
LONGEST_WAIT_S = 12.0


def request(req_id: int, num_blocks: int, arrived_at_s: float, priority: int = 0) -> Request:
    """One that has filled so many blocks when it ends; half of them with its prompt."""
    num_tokens = num_blocks * BLOCK
    num_prompt = max(1, num_tokens // 2)
    return Request(
        ReqId(req_id), tuple(range(num_prompt)), num_tokens - num_prompt,
        priority=priority, arrived_at_s=arrived_at_s,
    )  # fmt: skip


def computed(world: ClusterWorld, rank: Rank) -> tuple[int, int] | None:
    """The tokens that a running request knows and has computed."""
    for node in world.nodes:
        for sequence in node.scheduler.running:
            if sequence.rank == rank:
                return sequence.num_tokens, sequence.num_computed
    return None


def run_to_the_end(world: ClusterWorld, max_ticks: int = 4000) -> None:
    """The oldest always progresses and never loses what it has, but to a recall that was sent for
    an older one and arrives after that one's end; in the end all is free."""
    oldest, oldest_since_s = None, 0.0
    for _ in range(max_ticks):
        if not world.progress_s:
            break
        if oldest != min(world.progress_s):
            oldest, oldest_since_s = min(world.progress_s), world.now_s
        before = computed(world, oldest)
        world.tick()
        after = computed(world, oldest)
        is_late = oldest in world.gave_way_late
        if before is not None and oldest in world.progress_s and not is_late:
            assert after is not None, "the oldest was preempted"
            assert after >= before
        progress_s = max(oldest_since_s, world.progress_s.get(oldest, world.now_s))
        assert world.now_s - progress_s <= LONGEST_WAIT_S, f"{oldest} does not progress"
        world.check()
    assert not world.progress_s, "not everything has ended"
    world.settle()
    assert all(node.pool.num_free == node.pool.num_blocks for node in world.nodes)


def test_two_that_each_need_most_of_the_cluster_do_not_wait_for_each_other() -> None:
    world = ClusterWorld(seed=1, sizes=[12, 12])
    first, second = world.nodes
    world.add(first, request(1, 20, arrived_at_s=1.0))
    world.add(second, request(2, 20, arrived_at_s=2.0))
    run_to_the_end(world)
    assert [output.req_id for output in world.outputs if output.is_last] == [1, 2]
    assert world.num_preempted == 1


def test_age_is_the_same_on_all_instances_whoever_begins_first() -> None:
    world = ClusterWorld(seed=1, sizes=[12, 12])
    first, second = world.nodes
    world.add(second, request(2, 20, arrived_at_s=2.0))
    for _ in range(20):
        world.tick()
    world.add(first, request(1, 20, arrived_at_s=1.0))
    run_to_the_end(world)
    assert [output.req_id for output in world.outputs if output.is_last] == [1, 2]


def test_priority_comes_before_age() -> None:
    world = ClusterWorld(seed=1, sizes=[12, 12])
    first, second = world.nodes
    world.add(first, request(1, 20, arrived_at_s=1.0, priority=1))
    world.add(second, request(2, 20, arrived_at_s=2.0))
    run_to_the_end(world)
    assert [output.req_id for output in world.outputs if output.is_last] == [2, 1]


def filled(world: ClusterWorld, node: Node, num_requests: int, arrived_at_s: float) -> None:
    """Requests that take all memory of one node and keep it for long."""
    share = node.pool.num_blocks // num_requests
    for number in range(num_requests):
        world.add(node, request(100 + number, share, arrived_at_s))


def test_an_older_request_makes_a_creditor_preempt_younger_ones_and_no_more() -> None:
    world = ClusterWorld(seed=3, sizes=[6, 30])
    first, second = world.nodes
    filled(world, second, 3, arrived_at_s=9.0)
    world.add(first, request(1, 12, arrived_at_s=1.0))
    run_to_the_end(world)
    assert 1 <= world.num_preempted <= 2


def test_a_younger_request_waits_for_older_ones_elsewhere() -> None:
    world = ClusterWorld(seed=3, sizes=[6, 30])
    first, second = world.nodes
    filled(world, second, 3, arrived_at_s=1.0)
    world.add(first, request(1, 12, arrived_at_s=9.0))
    run_to_the_end(world)
    assert [o.req_id for o in world.outputs if o.is_last][-1] == 1


def test_a_creditor_has_back_what_younger_ones_borrow_before_it_preempts() -> None:
    world = ClusterWorld(seed=5, sizes=[16, 12])
    first, second = world.nodes
    world.add(first, request(9, 20, arrived_at_s=9.0))
    while second.ledger.num_lent_blocks < 3:
        world.tick()
    world.add(second, request(1, 11, arrived_at_s=1.0))
    while ReqId(1) not in {output.req_id for output in world.outputs if output.is_last}:
        world.tick()
        assert all(seq.req_id != 1 for seq in second.scheduler.waiting) or world.now_s < 30.0
    run_to_the_end(world)


def test_when_its_patience_is_over_the_oldest_begins_and_younger_ones_give_way() -> None:
    world = ClusterWorld(seed=7, sizes=[30])
    filled(world, world.nodes[0], 3, arrived_at_s=9.0)
    for _ in range(8):
        world.tick()
    patience_s = world.nodes[0].scheduler.config.patience_s
    world.add(world.nodes[0], request(1, 24, arrived_at_s=1.0))
    began_s = None
    while began_s is None:
        world.tick()
        assert world.now_s < 20.0
        began_s = world.now_s if computed(world, Rank(0, 1.0, ReqId(1))) else None
    assert patience_s < began_s < patience_s + 4.0
    run_to_the_end(world)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_whoever_asks_for_whatever_the_oldest_progresses_and_everything_ends(seed: int) -> None:
    random = Random(seed)
    sizes = [random.randint(3, 14) for _ in range(random.randint(2, 4))]
    world = ClusterWorld(seed, sizes)
    requests = [
        request(
            number,
            random.randint(1, world.max_blocks if random.random() < 0.4 else 4),
            arrived_at_s=random.randint(0, 9),
            priority=random.choice([0, 0, 0, 1]),
        )
        for number in range(1, random.randint(3, 10))
    ]
    while requests:
        world.add(random.choice(world.nodes), requests.pop())
        for _ in range(random.randint(0, 12)):
            world.tick()
    run_to_the_end(world)
    assert all(output.error is None for output in world.outputs)
    assert world.now_s < TICK_S * 4000
