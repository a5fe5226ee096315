"""The estimator against machines whose constants the test knows."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.infinite_llm.v1 import types_pb2
from services.worker.perf_estimator import (
    PerfEstimator,
    StepConstants,
    set_step_constants,
    step_constants,
)

#: 10 ms to read the weights, 1 ms for each request, a microsecond for each token.
START = StepConstants((1, 8, 32), (0.011, 0.018, 0.042), 1e-6)
GRID = [(batch, batch * context) for batch in (1, 2, 4, 8, 16, 32, 48) for context in (100, 4000)]


def worst_error(constants: StepConstants, truth: Callable[[int, int], float]) -> float:
    return max(abs(constants.step_s(*at) / truth(*at) - 1) for at in GRID)


def test_unseen_it_says_what_was_measured() -> None:
    assert worst_error(PerfEstimator(START).constants, START.step_s) < 1e-9


@pytest.mark.parametrize(
    ("start", "at_256_s"),
    [
        pytest.param(StepConstants((8, 32), (0.02, 0.01), 1e-6), 0.01, id="falling-by-noise"),
        pytest.param(StepConstants((8, 32), (0.02, 0.05), 1e-6), 0.33, id="rising"),
        pytest.param(StepConstants((4,), (0.02,), 1e-6), 1.28, id="one-point-promises-nothing"),
    ],
)
def test_larger_batches_than_measured_are_guessed_with_care(
    start: StepConstants, at_256_s: float
) -> None:
    assert PerfEstimator(start).constants.step_s(256, 0) == pytest.approx(at_256_s)


def test_it_finds_another_machine_from_a_mixture_of_steps() -> None:
    def truth(batch: int, tokens: int) -> float:
        return 0.016 + 0.0008 * batch + 0.7e-6 * tokens

    source, estimator = random.Random(1), PerfEstimator(START)
    for _ in range(300):
        batch, tokens = source.choice(GRID)
        estimator.observe(batch, tokens, truth(batch, tokens) * source.gauss(1.0, 0.03))
    assert worst_error(estimator.constants, truth) < 0.05


def test_it_follows_a_machine_that_slows_down() -> None:
    estimator = PerfEstimator(START)
    for _ in range(500):
        estimator.observe(8, 8000, START.step_s(8, 8000))
    for _ in range(200):
        estimator.observe(8, 8000, 1.5 * START.step_s(8, 8000))
    assert estimator.constants.step_s(8, 8000) == pytest.approx(
        1.5 * START.step_s(8, 8000), rel=0.05
    )


def test_what_one_batch_shows_corrects_its_neighbours() -> None:
    estimator = PerfEstimator(START)
    for _ in range(50):
        estimator.observe(8, 800, 1.2 * START.step_s(8, 800))
    before, after = START.step_s(4, 400), estimator.constants.step_s(4, 400)
    assert 1.05 * before < after < 1.2 * before


def test_disturbed_steps_do_not_pass_for_what_steps_cost() -> None:
    """Three in ten take longer by a quarter on average, some of them several times as long."""
    source, estimator = random.Random(1), PerfEstimator(START)
    for _ in range(300):
        batch, tokens = source.choice(GRID)
        disturbance = source.expovariate(4.0) if source.random() < 0.3 else 0.0
        estimator.observe(batch, tokens, 0.8 * START.step_s(batch, tokens) * (1 + disturbance))
    assert worst_error(estimator.constants, lambda *at: 0.8 * START.step_s(*at)) < 0.1


def test_one_step_alone_changes_little() -> None:
    estimator = PerfEstimator(START)
    estimator.observe(8, 800, 10.0)
    assert worst_error(estimator.constants, START.step_s) < 0.06


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 100), st.integers(0, 100_000), st.floats(0.0, 1.0)), max_size=50
    )
)
def test_whatever_it_sees_its_constants_stay_positive(steps: list[tuple[int, int, float]]) -> None:
    estimator = PerfEstimator(START)
    for step in steps:
        estimator.observe(*step)
    constants = estimator.constants
    assert min(*constants.non_attention_s, constants.attention_s_per_token) > 0


def test_a_change_counts_from_a_share_on() -> None:
    slower = StepConstants((1, 8, 32), (0.011, 0.0186, 0.042), 1e-6)
    assert slower.differs_from(START, 0.02)
    assert not slower.differs_from(START, 0.05)
    assert StepConstants((1, 8, 32), START.non_attention_s, 1.1e-6).differs_from(START, 0.05)


def test_constants_survive_the_wire() -> None:
    perf = types_pb2.PerfConstants(link_round_trip_s=1e-5)
    set_step_constants(perf, START)
    assert step_constants(perf) == START
    assert perf.link_round_trip_s == 1e-5
