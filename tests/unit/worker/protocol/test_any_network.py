"""Whatever the network does to control messages and block copies, and whoever dies meanwhile: no
block is owned twice, none is lost, no attention call reads a freed or foreign block, and everything
is free in the end (rules of lent memory, docs/protocol.md)."""

import asyncio
import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.worker.protocol.instance import NUM_BLOCKS
from tests.unit.worker.protocol.network import FINE, Fate
from tests.unit.worker.protocol.virtual_time import VirtualLoop
from tests.unit.worker.protocol.world import (
    NUM_INSTANCES,
    Abort,
    Kill,
    KillGManager,
    Leave,
    Life,
    Order,
    Recall,
    Submit,
    World,
)

delays_s = st.sampled_from([0.001, 0.01, 0.1, 0.7, 1.9, 4.0])
insts = st.integers(0, NUM_INSTANCES - 1)
numbers = st.integers(0, 5)
num_blocks = st.integers(1, NUM_BLOCKS)
#: Three in four need more memory than one instance has.
submits = st.builds(
    Submit,
    insts,
    st.sampled_from([5, 30, 50, 70]),
    st.sampled_from([2, 10, 20]),
    prefix=st.integers(0, 2),
)
orders = st.builds(Order, numbers, num_blocks, insts, st.sampled_from([False, False, True]))
faults = st.one_of(
    st.builds(Recall, insts),
    st.builds(Recall, insts),
    st.builds(Abort, numbers),
    st.builds(Kill, insts, delays_s),
    st.builds(Leave, insts),
    st.builds(KillGManager, delays_s),
)
rarely = st.sampled_from([False] * 5 + [True])
fates = st.builds(
    Fate,
    delay_s=delays_s,
    is_lost=rarely,
    is_answer_lost=rarely,
    again_after_s=st.sampled_from([None, None, None, 0.001, 0.5, 3.0]),
    is_garbled=rarely,
)
many_fates = st.lists(st.one_of(st.just(FINE), fates), min_size=10, max_size=60)
events = st.one_of(submits, orders, faults)
pauses_s = st.sampled_from([0.0, 0.02, 0.1, 0.5, 2.0])
lives = st.builds(
    Life,
    st.lists(submits, min_size=2, max_size=3),
    st.lists(st.tuples(pauses_s, events), min_size=6, max_size=12),
    control=many_fates,
    data=many_fates,
    gmanager=many_fates,
)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Everything that can go wrong does, and is logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def live(life: Life) -> World:
    world = World(life)
    loop = VirtualLoop()
    try:
        loop.run_until_complete(world.run())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    return world


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(lives)
@example(Life([Submit(0, 20, 40), Submit(2, 28, 40)], [(0.2, Order(0, 3, 1)), (0.1, Recall(1))]))
def test_no_block_is_lost_or_owned_twice_whatever_the_network_does(life: Life) -> None:
    assert live(life).violations == []


def test_on_a_good_network_requests_borrow_and_end_with_all_their_tokens() -> None:
    world = live(Life([Submit(0, 36, 12), Submit(1, 36, 12, prefix=1)], []))
    assert world.violations == []
    assert [answer.result() for answer in world.answers.values()] == [12, 12]
