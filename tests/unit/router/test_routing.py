"""Filter, score, pick, and what one request may use at all."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ids import Incarnation, InstId, ReqId
from services.router.capacity import max_request_tokens
from services.router.routing import MAX_AGE_S, Dispatched, Instance, pick, serving

BASE = Instance(
    inst_id=InstId(1),
    incarnation=Incarnation(1),
    address="a:1",
    model="tiny",
    block_size=16,
    num_blocks=100,
    max_model_len=4096,
    free_blocks=100,
    waiting_blocks=0,
    batch=0,
    draining=False,
    age_s=0.1,
    reported_at_s=10.0,
)


def instance(inst_id: int, **changes: object) -> Instance:
    return replace(BASE, inst_id=InstId(inst_id), **changes)  # type: ignore[arg-type]


def chosen(instances: list[Instance], num_tokens: int = 160) -> int | None:
    found = pick(instances, num_tokens, Dispatched())
    return None if found is None else found.inst_id


@pytest.mark.parametrize(
    ("changes", "is_serving"),
    [
        pytest.param({}, True, id="ready"),
        pytest.param({"draining": True}, False, id="draining"),
        pytest.param({"model": "other"}, False, id="other model"),
        pytest.param({"age_s": MAX_AGE_S + 0.1}, False, id="silent"),
    ],
)
def test_filter(changes: dict[str, object], is_serving: bool) -> None:
    assert bool(serving([instance(1, **changes)], "tiny")) is is_serving


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        pytest.param([], None, id="none"),
        pytest.param([instance(2), instance(1)], 1, id="tie goes to the smaller id"),
        pytest.param([instance(1, free_blocks=40), instance(2)], 2, id="more headroom"),
        pytest.param([instance(1, batch=8), instance(2)], 2, id="smaller batch"),
        pytest.param([instance(1, waiting_blocks=60), instance(2, batch=1)], 2, id="queue counts"),
        pytest.param(
            [instance(1, num_blocks=10, free_blocks=9), instance(2, batch=20)], 2, id="fits locally"
        ),
        pytest.param(
            [instance(1, free_blocks=0, batch=9), instance(2, free_blocks=0, batch=3)],
            2,
            id="full cluster queues at the smaller batch",
        ),
        pytest.param([instance(1, max_model_len=100), instance(2, batch=9)], 2, id="context"),
    ],
)
def test_pick(instances: list[Instance], expected: int | None) -> None:
    assert chosen(instances) == expected


@pytest.mark.parametrize(("free_blocks", "expected"), [(20, 1), (2, 2)])
def test_an_instance_with_the_prompt_computed_is_preferred_while_it_has_room(
    free_blocks: int, expected: int
) -> None:
    instances = [instance(1, free_blocks=free_blocks, batch=9), instance(2)]
    found = pick(instances, 160, Dispatched(), preferred=InstId(1))
    assert found is not None and found.inst_id == expected


@pytest.mark.parametrize(("is_pooling", "expected"), [(True, 2), (False, 1)])
def test_memory_beside_a_full_batch_is_there_to_be_lent(is_pooling: bool, expected: int) -> None:
    full_batch, full_memory = instance(1, batch=12, num_waiting=4), instance(2, free_blocks=0)
    found = pick([full_batch, full_memory], 160, Dispatched(), is_pooling=is_pooling)
    assert found is not None and found.inst_id == expected


def test_a_burst_spreads_before_the_next_report() -> None:
    dispatched = Dispatched()
    instances = [instance(1), instance(2)]
    counts = {1: 0, 2: 0}
    for number in range(20):
        found = pick(instances, 160, dispatched)
        assert found is not None
        dispatched.add(ReqId(number), found.inst_id, found.blocks_for(160), now_s=11.0)
        counts[found.inst_id] += 1
    assert counts == {1: 10, 2: 10}


def test_what_is_reported_or_finished_is_not_counted_twice() -> None:
    dispatched = Dispatched()
    dispatched.add(ReqId(1), InstId(1), 5, now_s=11.0)
    dispatched.add(ReqId(2), InstId(1), 7, now_s=12.0)
    assert dispatched.unreported(instance(1)) == (12, 2)
    assert dispatched.unreported(instance(2)) == (0, 0)
    assert dispatched.unreported(instance(1, reported_at_s=11.5)) == (7, 1)
    dispatched.remove(ReqId(2), InstId(1))
    assert dispatched.unreported(instance(1, reported_at_s=11.5)) == (0, 0)


INSTANCES = st.builds(
    instance,
    st.integers(1, 9),
    free_blocks=st.integers(0, 100),
    waiting_blocks=st.integers(0, 50),
    batch=st.integers(0, 20),
)


@given(
    st.lists(INSTANCES, max_size=6, unique_by=lambda i: i.inst_id), st.integers(1, 2000), st.data()
)
@settings(deadline=None)
def test_pick_is_independent_of_order(
    instances: list[Instance], num_tokens: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(instances))
    assert chosen(list(shuffled), num_tokens) == chosen(instances, num_tokens)
    if any(i.free_blocks - i.waiting_blocks >= i.blocks_for(num_tokens) for i in instances):
        found = next(i for i in instances if i.inst_id == chosen(instances, num_tokens))
        assert found.free_blocks - found.waiting_blocks >= found.blocks_for(num_tokens)


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([instance(1)], 1600, id="one"),
        pytest.param([instance(1), instance(2)], 3200 - 16, id="a creditor keeps a block"),
        pytest.param([instance(i) for i in range(4)], 4096, id="the context bounds"),
        pytest.param([instance(1, num_blocks=3), instance(2)], 1648 - 16, id="unequal"),
    ],
)
def test_max_request_tokens(instances: list[Instance], expected: int) -> None:
    assert max_request_tokens(instances) == expected
