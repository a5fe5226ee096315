"""Traces are the same each time and of the sizes they say; ratios compare what they claim to."""

import argparse
from pathlib import Path

import pytest

from benchmarks.lent_steps import Rounds, Steps
from benchmarks.longest_context import Longest
from benchmarks.mixed_traces import TAILS, UNIFORM, Job, Trace
from benchmarks.pooling import Result, parts, plot
from benchmarks.trace_replay import Comparison, Outcome, Replay

CAPACITY = 1536


@pytest.mark.parametrize("name", [UNIFORM, *TAILS])
def test_a_trace_is_the_same_each_time(name: str) -> None:
    assert Trace.generate(name, 40, CAPACITY) == Trace.generate(name, 40, CAPACITY)
    assert Trace.generate(name, 40, CAPACITY) != Trace.generate(name, 40, CAPACITY, seed=1)


@pytest.mark.parametrize("name", TAILS)
def test_the_tail_has_the_sizes_that_its_name_says(name: str) -> None:
    jobs = Trace.generate(name, 100, CAPACITY).jobs
    long = [job for job in jobs if job.num_tokens > 200]
    low, high = TAILS[name]
    assert len(long) == 12
    assert all(low * CAPACITY - 1 <= job.num_tokens <= high * CAPACITY for job in long)
    assert long[-1] in jobs[:67]
    assert [job.at_s for job in jobs] == sorted(job.at_s for job in jobs)


def test_only_the_high_tail_exceeds_an_instance() -> None:
    exceeds = {
        name: any(job.num_tokens > CAPACITY for job in Trace.generate(name, 60, CAPACITY).jobs)
        for name in TAILS
    }
    assert exceeds == {"low": False, "middle": False, "high": True}


def test_a_uniform_trace_asks_the_same_of_everybody() -> None:
    jobs = Trace.generate(UNIFORM, 20, CAPACITY).jobs
    assert len({(len(job.prompt), job.num_output) for job in jobs}) == 1


def replay(*ended_s: float | None) -> Replay:
    return Replay(tuple(Outcome(Job(0.0, (1,), 10), at_s) for at_s in ended_s))


def test_what_is_not_served_brings_no_tokens() -> None:
    assert replay(1.0, 4.0).tokens_per_s == 5.0
    assert replay(1.0, None).tokens_per_s == 10.0
    assert replay(None).tokens_per_s == 0.0


def test_pooled_over_static_of_all_and_of_what_both_serve() -> None:
    compared = Comparison(pooled=(replay(1.0, 2.0),), static=(replay(2.0, None),))
    assert compared.over_all == 2.0  # 20 tokens in 2 s against 10 in 2 s
    assert compared.over_common == 2.0  # 10 tokens in 1 s against 10 in 2 s


def test_a_slowdown_is_the_throughput_that_is_lost() -> None:
    rounds = Rounds([Steps(0.01, 0.01), Steps(0.01, 0.0125), Steps(0.01, 0.02)])
    assert rounds.ratio == 1.25
    assert rounds.slowdown == pytest.approx(0.2)


def measured() -> Result:
    rounds = Rounds([Steps(0.02, 0.021)])
    compared = Comparison(pooled=(replay(1.0),), static=(replay(2.0),))
    traces = {num: dict.fromkeys((UNIFORM, *TAILS), compared) for num in (2, 4)}
    lent, moving = {2048: rounds, 8192: rounds}, {16: rounds, 32: rounds}
    return Result(lent, moving, traces, {2: Longest(2000, 1000), 4: Longest(3900, 1000)})


def test_the_last_line_has_every_figure() -> None:
    assert measured().to_json() == {
        "lent_step_over_local": {"2048": 1.05, "8192": 1.05},
        "move_16_slowdown": 0.0476,
        "move_32_slowdown": 0.0476,
        "pooled_over_static": {"low": 2.0, "middle": 2.0, "high": 2.0},
        "longest_context_over_one_instance": {"2": 2.0, "4": 3.9},
        "uniform_pooled_over_static": 2.0,
    }


def test_what_was_not_asked_for_is_null_or_empty() -> None:
    assert Result().to_json()["move_16_slowdown"] is None
    assert Result().to_json()["lent_step_over_local"] == {}


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    plot(measured(), tmp_path / "figures" / "pooling.svg")
    assert "<svg" in (tmp_path / "figures" / "pooling.svg").read_text(encoding="utf-8")


def test_parts_that_do_not_exist_are_refused() -> None:
    assert parts("lent,move") == ("lent", "move")
    with pytest.raises(argparse.ArgumentTypeError):
        parts("lent,sleep")
