"""Traces are the same each time and of the sizes they say; ratios compare what they claim to."""

import argparse
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.lent_steps import Rounds, Steps
from benchmarks.longest_context import Longest
from benchmarks.mixed_traces import MAX_BATCH, NUM_BLOCKS, TAILS, UNIFORM, Job, Trace
from benchmarks.pooling import PARTS, Result, plot, some_of
from benchmarks.trace_replay import Comparison, Counts, Replay

CAPACITY = 1536


def jobs(trace: Trace, user: int, num_jobs: int = 5) -> list[Job]:
    return list(islice(trace.jobs_of(user), num_jobs))


@pytest.mark.parametrize("name", [UNIFORM, *TAILS])
def test_a_trace_is_the_same_each_time(name: str) -> None:
    assert jobs(Trace(name, 2, CAPACITY), 0) == jobs(Trace(name, 2, CAPACITY), 0)
    assert jobs(Trace(name, 2, CAPACITY), 0) != jobs(Trace(name, 2, CAPACITY, seed=1), 0)
    assert jobs(Trace(name, 2, CAPACITY), 4) != jobs(Trace(name, 2, CAPACITY), 5)


@pytest.mark.parametrize("name", TAILS)
def test_the_tail_has_the_sizes_that_its_name_says(name: str) -> None:
    trace, (low, high) = Trace(name, 4, CAPACITY), TAILS[name]
    assert trace.num_long_users == 2
    for user in range(trace.num_long_users):
        sizes = [job.num_tokens for job in jobs(trace, user)]
        assert all(low * CAPACITY - 1 <= size <= high * CAPACITY < CAPACITY for size in sizes)
    assert all(job.num_tokens < 200 for job in jobs(trace, trace.num_users - 1))


def test_short_requests_fill_every_batch_but_not_the_memory() -> None:
    trace = Trace("low", 2, NUM_BLOCKS * 16)
    assert trace.num_users - trace.num_long_users > 2 * MAX_BATCH
    assert trace.capacity_tokens / 2 == MAX_BATCH * 96


def test_a_uniform_trace_asks_the_same_of_everybody() -> None:
    trace = Trace(UNIFORM, 2, CAPACITY)
    assert trace.num_long_users == 0
    sizes = {(len(j.prompt), j.num_output) for user in (0, 7) for j in jobs(trace, user)}
    assert len(sizes) == 1


def replay(*tokens: float, duration_s: float = 1.0) -> Replay:
    instances = tuple(Counts(num, num / 2, 0.0, 0.0) for num in tokens)
    return Replay(instances, duration_s, num_long_served=1)


def test_throughput_is_that_of_all_instances() -> None:
    assert replay(30.0, 10.0, duration_s=2.0).tokens_per_s == 20.0
    assert "batches 2.0 + 2.0" in replay(30.0, 10.0).describe()


def test_pooled_over_static_is_of_the_median_turns() -> None:
    pooled = (replay(20.0), replay(22.0), replay(90.0))
    compared = Comparison(pooled, static=(replay(11.0),), in_turn=(replay(5.5),))
    assert (compared.over_static, compared.over_in_turn) == (2.0, 4.0)


def test_a_slowdown_is_the_throughput_that_is_lost() -> None:
    rounds = Rounds([Steps(0.01, 0.01), Steps(0.01, 0.0125), Steps(0.01, 0.02)])
    assert rounds.ratio == 1.25
    assert rounds.slowdown == pytest.approx(0.2)


def measured() -> Result:
    rounds = Rounds([Steps(0.02, 0.021)])
    compared = Comparison((replay(20.0),), static=(replay(10.0),), in_turn=(replay(5.0),))
    traces = {num: dict.fromkeys((UNIFORM, *TAILS), compared) for num in (2, 4)}
    lent, moving = {2048: rounds, 8192: rounds}, {16: rounds, 32: rounds}
    return Result(lent, moving, traces, {2: Longest(2000, 1000), 4: Longest(3900, 1000)})


def test_the_last_line_has_every_figure() -> None:
    assert measured().to_json() == {
        "lent_step_over_local": {"2048": 1.05, "8192": 1.05},
        "move_16_slowdown": 0.0476,
        "move_32_slowdown": 0.0476,
        "pooled_over_static": {"low": 2.0, "middle": 2.0, "high": 2.0},
        "pooled_over_in_turn": {"low": 4.0, "middle": 4.0, "high": 4.0},
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
    assert some_of(PARTS)("lent,move") == ("lent", "move")
    with pytest.raises(argparse.ArgumentTypeError):
        some_of(PARTS)("lent,sleep")
