"""The equations of the performance model, by numbers computed by hand.

The constants of `PERF`: W/f(beta) = 10 ms + 1 ms * beta, 1/g = 1 microsecond per token; a block
has 16 tokens.
"""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gmanager.cluster import BatchPoint, InstanceLoad
from services.gmanager.perf_model import (
    MAX_WAITING,
    OperatingPoint,
    non_attention_s,
    operating_point,
)
from tests.unit.gmanager.builders import PERF, make_instance

CURVE = (BatchPoint(1, 0.070), BatchPoint(8, 0.105), BatchPoint(32, 0.201))


def point(**changes: object) -> OperatingPoint:
    base = OperatingPoint(
        perf=PERF,
        block_size=16,
        running=2,
        attended_tokens=1000,
        free_blocks=0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch", "step_s"),
    [
        pytest.param(0.5, 0.070, id="below-the-first-constant"),
        pytest.param(1, 0.070, id="first-point"),
        pytest.param(4, 0.085, id="between"),
        pytest.param(8, 0.105, id="inner-point"),
        pytest.param(20, 0.153, id="second-stretch"),
        pytest.param(32, 0.201, id="last-point"),
        pytest.param(42, 0.241, id="beyond-on-the-last-slope"),
    ],
)
def test_the_non_attention_curve(batch: float, step_s: float) -> None:
    assert non_attention_s(CURVE, batch) == pytest.approx(step_s)


def test_one_measured_point_promises_no_gain_from_a_larger_batch() -> None:
    assert non_attention_s((BatchPoint(4, 0.1),), 8) == pytest.approx(0.2)


def test_noise_in_the_last_points_makes_no_larger_batch_faster() -> None:
    assert non_attention_s((BatchPoint(1, 0.1), BatchPoint(2, 0.09)), 50) == pytest.approx(0.09)


def test_step_and_throughput() -> None:
    # 10 + 2 * 1 ms, and 1000 tokens * 1 us
    assert point().step_s == pytest.approx(0.013)
    assert point().tokens_per_s == pytest.approx(2 / 0.013)


def test_a_report_that_knows_less_tokens_than_were_moved_costs_no_negative_time() -> None:
    assert point(attended_tokens=16).lend_out(10).step_s == pytest.approx(0.012)


def test_nothing_running_yields_nothing() -> None:
    assert point(running=0, attended_tokens=0).tokens_per_s == 0.0


def test_a_debtor_sheds_attention() -> None:
    # 10 blocks * 16 tokens * 1 us = 0.16 ms
    assert point().lend_out(10).step_s == pytest.approx(0.013 - 0.00016)


def test_a_creditor_takes_attention_in() -> None:
    assert point(free_blocks=10).take_in(10).step_s == pytest.approx(0.013 + 0.00016)


def test_freed_blocks_let_waiting_requests_in() -> None:
    crowded = point(blocks_to_admit=(0, 5, 10, 15))
    assert crowded.batch == 2
    after = crowded.lend_out(10)
    assert after.batch == 4
    # 10 + 4 * 1 ms; the old tokens less the lent ones, plus two new requests of 5 blocks
    assert after.step_s == pytest.approx(0.014 + (1000 - 160 + 160) * 1e-6)
    assert crowded.lend_out(1000).batch == 5


def test_a_creditor_past_its_spare_room_loses_batch() -> None:
    lender = point(free_blocks=20, blocks_to_admit=(0, 5, 10))
    assert lender.take_in(10).batch == 4
    assert lender.take_in(15).batch == 3
    assert lender.take_in(20).batch == 2


def test_what_a_link_costs_is_added_to_the_step() -> None:
    # 16 tokens less to attend to, and the link
    assert point(link_s=0.002).step_s == pytest.approx(0.015)
    assert point().lend_out(1, link_s=0.002).step_s == pytest.approx(0.015 - 16e-6)


def test_the_operating_point_counts_tokens_where_they_are_attended_to() -> None:
    load = InstanceLoad(
        free_blocks=7,
        lent_blocks=4,
        borrowed_blocks=10,
        running=3,
        waiting=2,
        waiting_blocks=9,
        running_tokens=500,
    )
    of_load = operating_point(make_instance(1, load), link_s=0.002)
    assert of_load == point(
        running=3,
        attended_tokens=500 + (4 - 10) * 16,
        free_blocks=7,
        blocks_to_admit=(0, 5, 9),
        link_s=0.002,
    )


@pytest.mark.parametrize(
    ("waiting", "waiting_blocks", "sizes", "blocks_to_admit"),
    [
        pytest.param(3, 0, (), (0, 1, 2, 3), id="of-unknown-size-a-block-each"),
        pytest.param(3, 10, (), (0, 4, 7, 10), id="the-average"),
        pytest.param(3, 10, (6, 1, 3), (0, 6, 7, 10), id="one-by-one-in-their-order"),
        pytest.param(4, 20, (9, 1), (0, 9, 10, 15, 20), id="the-rest-is-shared-by-the-rest"),
        pytest.param(2, 5, (9, 9, 9), (0, 9, 18), id="more-sizes-than-requests"),
        pytest.param(3, 5, (9,), (0, 9, 10, 11), id="sizes-beyond-their-sum"),
        pytest.param(2, 5, (0, 3), (0, 1, 4), id="no-size-is-a-block"),
        pytest.param(0, 0, (), (0,), id="nobody-waits"),
    ],
)
def test_what_the_waiting_requests_need(
    waiting: int, waiting_blocks: int, sizes: tuple[int, ...], blocks_to_admit: tuple[int, ...]
) -> None:
    load = InstanceLoad(waiting=waiting, waiting_blocks=waiting_blocks, waiting_sizes=sizes)
    assert operating_point(make_instance(1, load)).blocks_to_admit == blocks_to_admit


def test_a_queue_beyond_reason_is_not_laid_out() -> None:
    load = InstanceLoad(waiting=4_000_000_000, waiting_blocks=4_000_000_000)
    assert operating_point(make_instance(1, load)).waiting == MAX_WAITING


@settings(deadline=None)
@given(
    num_blocks=st.integers(0, 60),
    running=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 30), max_size=10),
)
def test_moving_in_two_steps_is_moving_at_once(
    num_blocks: int, running: int, sizes: list[int]
) -> None:
    start = point(
        running=running, free_blocks=60, blocks_to_admit=tuple(accumulate(sizes, initial=0))
    )
    half = num_blocks // 2
    rest = num_blocks - half
    assert start.lend_out(half).lend_out(rest) == start.lend_out(num_blocks)
    assert start.take_in(half).take_in(rest) == start.take_in(num_blocks)
    assert start.take_in(half).lend_out(half) == start


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), max_size=10),
    running=st.integers(0, 60),
    counts=st.lists(st.integers(-100, 100), min_size=1),
    curve=st.sampled_from([CURVE, CURVE[:1], (BatchPoint(1, 0.1), BatchPoint(2, 0.09))]),
)
def test_many_moves_at_once_are_evaluated_as_one_by_one(
    sizes: list[int], running: int, counts: list[int], curve: tuple[BatchPoint, ...]
) -> None:
    start = point(
        perf=replace(PERF, non_attention=curve),
        running=running,
        blocks_to_admit=tuple(accumulate(sizes, initial=0)),
        link_s=0.002,
    )
    one_by_one = [start.lend_out(num_blocks).tokens_per_s for num_blocks in counts]
    at_once = start.tokens_per_s_lending(np.array(counts))
    assert at_once.tolist() == pytest.approx(one_by_one)
