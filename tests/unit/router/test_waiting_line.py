"""Who goes into the cluster when it is full: order, patience, bounds; and what counts as room."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import Overloaded
from services.common.ids import InstId, ReqId
from services.common.lendable import pooled_tokens
from services.router.capacity import MAX_BACKLOG, Room
from services.router.routing import Dispatched, Instance
from services.router.waiting_line import Place, WaitingLine
from tests.unit.router.test_routing import instance

PATIENCE_S = 5.0


def busy(inst_id: int, free_blocks: int, **changes: object) -> Instance:
    """With as many waiting as may wait there."""
    values: dict[str, object] = {"free_blocks": free_blocks, "num_waiting": MAX_BACKLOG}
    return instance(inst_id, **(values | changes))


def room_of(*instances: Instance, is_pooling: bool = True) -> Room:
    return Room(instances, Dispatched(), is_pooling)


def line_of(*num_tokens: int) -> tuple[WaitingLine, list[Place]]:
    line = WaitingLine(max_length=8, patience_s=PATIENCE_S)
    return line, [line.join(0, number, now_s=0.0) for number in num_tokens]


def test_a_full_line_says_when_it_may_be_worth_coming_back() -> None:
    """After as long as whoever waits for longest has waited."""
    line = WaitingLine(max_length=2, patience_s=PATIENCE_S)
    line.join(1, 16, now_s=10.0)
    line.join(0, 16, now_s=20.0)
    for now_s, retry_after_s in [(10.5, 1.0), (34.0, 24.0)]:
        with pytest.raises(Overloaded) as refused:
            line.join(0, 16, now_s)
        assert refused.value.retry_after_s == retry_after_s


def test_the_room_is_what_one_instance_has_and_what_others_lend() -> None:
    assert room_of(busy(1, 3), busy(2, 5)).take(16 * 7)  # one block is kept
    assert not room_of(busy(1, 3), busy(2, 5)).take(16 * 7 + 1)
    assert pooled_tokens([(3, 16), (5, 16), (0, 16)]) == 16 * 7


def test_without_pooling_it_is_what_one_instance_has() -> None:
    assert room_of(busy(1, 3), busy(2, 5), is_pooling=False).take(16 * 5)
    assert not room_of(busy(1, 3), busy(2, 5), is_pooling=False).take(16 * 5 + 1)
    room = room_of(busy(1, 3), busy(2, 5), is_pooling=False)
    assert [room.take(16 * 3) for _ in range(3)] == [True, True, False]


def test_what_waits_on_instances_or_was_sent_to_them_is_no_room() -> None:
    assert not room_of(busy(1, 5, waiting_blocks=3)).take(16 * 3)
    dispatched = Dispatched()
    dispatched.add(ReqId(1), InstId(1), 3, now_s=11.0)
    assert not Room([busy(1, 5)], dispatched, True).take(16 * 3)
    assert Room([busy(1, 5)], dispatched, True).take(16 * 2)


def test_a_few_wait_on_the_instances_themselves() -> None:
    room = room_of(busy(1, 0, num_waiting=MAX_BACKLOG - 1), busy(2, 0, num_waiting=0))
    assert [room.take(16) for _ in range(MAX_BACKLOG + 2)] == [True] * (MAX_BACKLOG + 1) + [False]


def test_one_that_does_not_fit_lets_others_pass_while_its_patience_lasts() -> None:
    line, (big, small, another) = line_of(160, 16, 16)
    assert line.admit(room_of(busy(1, 1)), now_s=PATIENCE_S) == [small]
    assert line.admit(room_of(busy(1, 1)), now_s=PATIENCE_S + 1.0) == []
    assert line.admit(room_of(busy(1, 11)), now_s=PATIENCE_S + 1.0) == [big, another]
    assert len(line) == 0


def test_priority_comes_before_arrival() -> None:
    line, (first,) = line_of(16)
    urgent = line.join(-1, 16, now_s=1.0)
    assert line.admit(room_of(busy(1, 1)), now_s=1.0) == [urgent]
    assert line.admit(room_of(busy(1, 1)), now_s=1.0) == [first]


def test_a_long_line_refuses_and_who_leaves_makes_place() -> None:
    line, places = line_of(*[16] * 8)
    with pytest.raises(Overloaded):
        line.join(0, 16, now_s=0.0)
    line.leave(places[3])
    line.leave(places[3])  # late, and again
    assert line.join(0, 16, now_s=0.0)


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=50)
def test_everybody_goes_in_at_last_whatever_others_ask_for(seed: int) -> None:
    """Small ones keep coming; all memory becomes free now and then, as streams end."""
    random = Random(seed)
    line = WaitingLine(max_length=1000, patience_s=PATIENCE_S)
    big = line.join(0, 16 * 10, now_s=0.0)
    free, held = 10, list[tuple[float, int]]()
    for step in range(200):
        now_s = step * 0.5
        line.join(0, 16 * random.randint(1, 3), now_s)
        free += sum(blocks for end_s, blocks in held if end_s <= now_s)
        held = [(end_s, blocks) for end_s, blocks in held if end_s > now_s]
        if step == 0:
            held, free = [(3.0, 4)], 6
        for place in line.admit(room_of(busy(1, free)), now_s):
            if place is big:
                return
            held.append((now_s + random.uniform(0.5, 6.0), place.num_tokens // 16))
            free -= place.num_tokens // 16
    raise AssertionError("it starved")
