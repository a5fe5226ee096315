"""The equations of the performance model, by numbers computed by hand.

The constants of `PERF`: W/f(beta) = 10 ms + 1 ms * beta, 1/g = 1 microsecond per token; a block
has 16 tokens.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gmanager.cluster import BatchPoint, InstanceLoad
from services.gmanager.perf_model import OperatingPoint, non_attention_s, operating_point
from tests.unit.gmanager.builders import PERF, make_instance

CURVE = (BatchPoint(1, 0.070), BatchPoint(8, 0.105), BatchPoint(32, 0.201))


def point(**changes: object) -> OperatingPoint:
    base = OperatingPoint(
        perf=PERF,
        block_size=16,
        running=2,
        attended_tokens=1000,
        free_blocks=0,
        waiting=0,
        waiting_blocks=0,
        num_creditors=0,
        num_remote_rows=0,
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
    assert point(attended_tokens=16).lend_out(10, 1, 1).step_s == pytest.approx(0.012)


def test_nothing_running_yields_nothing() -> None:
    assert point(running=0, attended_tokens=0).tokens_per_s == 0.0


def test_a_debtor_sheds_attention() -> None:
    # 10 blocks * 16 tokens * 1 us = 0.16 ms
    assert point().lend_out(10, 1, 1).step_s == pytest.approx(0.013 - 0.00016)


def test_a_creditor_takes_attention_in() -> None:
    assert point(free_blocks=10).take_in(10).step_s == pytest.approx(0.013 + 0.00016)


def test_freed_blocks_let_waiting_requests_in() -> None:
    crowded = point(waiting=3, waiting_blocks=15)
    assert crowded.batch == 2
    after = crowded.lend_out(10, 1, 1)
    assert after.batch == 4
    # 10 + 4 * 1 ms; the old tokens less the lent ones, plus two new requests of 5 blocks
    assert after.step_s == pytest.approx(0.014 + (1000 - 160 + 160) * 1e-6)
    assert crowded.lend_out(1000, 1, 1).batch == 5


def test_a_creditor_past_its_spare_room_loses_batch() -> None:
    lender = point(free_blocks=20, waiting=2, waiting_blocks=10)
    assert lender.take_in(10).batch == 4
    assert lender.take_in(15).batch == 3
    assert lender.take_in(20).batch == 2


def test_the_link_costs_a_round_trip_per_creditor_and_bytes_per_row_in_every_layer() -> None:
    perf = replace(
        PERF, num_layers=30, link_round_trip_s=4e-5, link_bytes_per_s=1e9, row_bytes=5000
    )
    debtor = point(perf=perf, num_creditors=1, num_remote_rows=3)
    # 30 layers * (40 us + 3 * 5 us)
    assert debtor.step_s == pytest.approx(0.013 + 30 * 55e-6)
    # one more creditor with one more row, 16 tokens less to attend to
    assert debtor.lend_out(1, 1, 1).step_s == pytest.approx(0.013 + 30 * 100e-6 - 16e-6)
    # a known creditor that already holds a part of the request costs nothing more
    assert debtor.lend_out(1, 0, 0).step_s == pytest.approx(debtor.step_s - 16e-6)


def test_an_unknown_link_rate_counts_no_bytes() -> None:
    perf = replace(PERF, num_layers=2, row_bytes=5000)
    assert point(perf=perf, num_creditors=1, num_remote_rows=1).step_s == pytest.approx(0.013)


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
    of_load = operating_point(make_instance(1, load), num_creditors=1, num_remote_rows=2)
    assert of_load == point(
        running=3,
        attended_tokens=500 + (4 - 10) * 16,
        free_blocks=7,
        waiting=2,
        waiting_blocks=9,
        num_creditors=1,
        num_remote_rows=2,
    )


def test_a_waiting_request_of_unknown_size_needs_a_block() -> None:
    assert operating_point(make_instance(1, InstanceLoad(waiting=3))).waiting_blocks == 3


@settings(deadline=None)
@given(
    num_blocks=st.integers(0, 60),
    running=st.integers(0, 40),
    waiting=st.integers(0, 10),
    waiting_blocks=st.integers(10, 300),
)
def test_moving_in_two_steps_is_moving_at_once(
    num_blocks: int, running: int, waiting: int, waiting_blocks: int
) -> None:
    start = point(
        running=running,
        free_blocks=60,
        waiting=waiting,
        waiting_blocks=waiting_blocks,
    )
    half = num_blocks // 2
    rest = num_blocks - half
    assert start.lend_out(half, 1, 1).lend_out(rest, 0, 0) == start.lend_out(num_blocks, 1, 1)
    assert start.take_in(half).take_in(rest) == start.take_in(num_blocks)
    assert start.take_in(half).lend_out(half, 0, 0) == start


@settings(deadline=None)
@given(waiting=st.integers(1, 50), extra_blocks=st.integers(0, 500), data=st.data())
def test_blocks_to_admit_are_the_fewest(
    waiting: int, extra_blocks: int, data: st.DataObject
) -> None:
    crowded = point(waiting=waiting, waiting_blocks=waiting + extra_blocks)
    num_requests = data.draw(st.integers(1, waiting))
    enough = crowded.blocks_to_admit(num_requests)
    assert replace(crowded, free_blocks=enough).admitted >= num_requests
    assert replace(crowded, free_blocks=enough - 1).admitted < num_requests
