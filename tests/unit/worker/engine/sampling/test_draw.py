"""The draw: how often each token comes, and what decides it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.sampling import SamplingParams
from services.worker.engine.sampling import draw as draw_module
from services.worker.engine.sampling.draw import draw, weights_of
from tests.unit.worker.engine.sampling import oracle
from tests.unit.worker.engine.sampling.builders import next_tokens, sequence_of, sequences_of


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def draw_many(logits: torch.Tensor, count: int, **params: Any) -> list[float]:
    """How often each token comes in `count` draws of one seed."""
    sampling = [SamplingParams(**params)] * count
    tokens = draw(logits.expand(count, -1).numpy(), sampling, range(count))
    seen = torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])
    return [number / count for number in seen.tolist()]


def chi_square(seen: list[float], wanted: list[float], count: int) -> float:
    assert all(s == 0.0 for s, w in zip(seen, wanted, strict=True) if w == 0.0)
    return sum(count * (s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True) if w)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="plain"),
        pytest.param({"temperature": 0.5}, id="cold"),
        pytest.param({"temperature": 3.0}, id="hot"),
        pytest.param({"top_k": 7}, id="top_k"),
        pytest.param({"top_p": 0.6}, id="top_p"),
        pytest.param({"min_p": 0.3}, id="min_p"),
        pytest.param({"temperature": 1.5, "min_p": 0.1, "top_k": 9, "top_p": 0.8}, id="all"),
    ],
)
def test_frequencies_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(1))
    params = {"temperature": 1.0, "seed": 3} | params
    wanted = oracle.distribution(logits[0].tolist(), SamplingParams(**params))
    num_draws = 20_000
    freedom = sum(w > 0 for w in wanted) - 1
    statistic = chi_square(draw_many(logits, num_draws, **params), wanted, num_draws)
    # Far beyond the mean: 3.7 standard deviations; the seed is fixed, so it passes or not for good.
    assert statistic < freedom + 3.7 * math.sqrt(2 * freedom)


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=12),
    temperature=st.sampled_from([1e-30, 0.1, 0.7, 1.0, 50.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1e-9, 0.1, 0.35, 0.77, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.61, 1.0]),
)
def test_exactly_the_tokens_of_the_oracle_are_possible(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Ties included: of equally likely tokens the smaller ids stay."""
    params = SamplingParams(temperature, top_p, top_k, min_p=min_p)
    weights = weights_of(np.array([logits], dtype=np.float32), [params])[0].astype(np.float64)
    probabilities = (weights / weights.sum()).tolist()
    assert probabilities == pytest.approx(oracle.distribution(logits, params), abs=1e-6)


def test_a_cut_beyond_the_candidates_is_found_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(2).normal(size=(3, 300)).astype(np.float32)
    cuts: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 200}, {"top_k": 200, "top_p": 0.99}]
    params = [SamplingParams(2.0, **cut) for cut in cuts]
    expected = weights_of(logits, params)
    monkeypatch.setattr(draw_module, "NUM_CANDIDATES", 10)
    np.testing.assert_array_equal(weights_of(logits, params), expected)
    assert 10 < (expected[0] > 0).sum() < 300


def test_a_tiny_top_p_still_leaves_one_token() -> None:
    assert draw_many(logits_of([0.3, 0.7]), 50, temperature=1.0, top_p=1e-300)[1] == 1.0


def test_a_temperature_near_zero_is_greedy() -> None:
    assert draw_many(logits_of([0.3, 0.3, 0.4]), 50, temperature=1e-320)[2] == 1.0


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    mine: dict[str, Any] = {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5}
    alone = [next_tokens(logits[:1], [sequence])[0] for sequence in sequences_of(20, **mine)]
    others = [sequence_of(temperature=0.7, seed=5, top_p=0.5), sequence_of()]
    together = [
        next_tokens(logits[[1, 0, 2]], [others[0], sequence, others[1]])[1]
        for sequence in sequences_of(20, **mine)
    ]
    assert alone == together
    assert len(set(alone)) > 1


def test_rounding_hardly_ever_changes_what_is_drawn() -> None:
    """Thousands of possible tokens, each as much more or less likely as a sum in another order
    makes it; so that the cut of top_p falls elsewhere now and then, too."""
    random = np.random.default_rng(6)
    logits = random.normal(size=(100, 20_000)).astype(np.float32)
    rounded = logits + random.normal(scale=1e-4, size=logits.shape).astype(np.float32)
    params = [SamplingParams(1.0, top_p=0.95, seed=4)] * len(logits)
    num_kept = np.count_nonzero(weights_of(logits, params), axis=-1)
    assert (num_kept != np.count_nonzero(weights_of(rounded, params), axis=-1)).any()
    assert draw(logits, params, range(100)) == draw(rounded, params, range(100))


def test_one_draw_tells_nothing_of_the_next() -> None:
    tokens = draw(
        np.zeros((20_000, 8), dtype=np.float32), [SamplingParams(1.0)] * 20_000, range(20_000)
    )
    pairs = np.array(tokens).reshape(-1, 2) @ (8, 1)
    seen = (np.bincount(pairs, minlength=64) / len(pairs)).tolist()
    assert chi_square(seen, [1 / 64] * 64, len(pairs)) < 63 + 3.7 * math.sqrt(2 * 63)


def test_another_seed_gives_other_tokens() -> None:
    logits = torch.zeros(20, 1000)
    tokens = next_tokens(logits, [sequence_of(temperature=1.0, seed=seed) for seed in range(20)])
    assert len(set(tokens)) > 15


@pytest.mark.parametrize("num_possible", [1, 40, 3000, 9990, 10_000])
def test_what_is_impossible_is_never_drawn_and_takes_nothing_from_the_others(
    num_possible: int,
) -> None:
    """Where there are more tokens than candidates, and few or many of them may come."""
    random = np.random.default_rng(4)
    possible = np.sort(random.permutation(10_000)[:num_possible])
    dense = random.normal(size=(1, num_possible)).astype(np.float32)
    sparse = np.full((1, 10_000), -np.inf, dtype=np.float32)
    sparse[0, possible] = dense[0]
    for cut in ({"top_p": 0.9}, {"top_k": 7}, {"top_k": 700, "top_p": 0.99}):
        params = [SamplingParams(1.5, **cut)]
        wanted = np.zeros(10_000, dtype=np.float32)
        wanted[possible] = weights_of(dense, params)[0]
        assert weights_of(sparse, params)[0].tolist() == wanted.tolist()
