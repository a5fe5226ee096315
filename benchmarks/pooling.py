"""`python -m benchmarks.pooling`: what one memory for the whole cluster brings, and what it costs.

The same engine and traces with and without it: steps with blocks elsewhere and on their way,
throughput of mixed and uniform traces, the longest context. Whole local clusters, one thread for
each instance.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.command import new_parser, run
from benchmarks.lent_steps import Rounds, measure_lent, measure_moving
from benchmarks.longest_context import Longest, measure_longest
from benchmarks.mixed_traces import MAX_BATCH, NUM_BLOCKS, TAILS, UNIFORM, Trace
from benchmarks.plots import Series, grouped_bars
from benchmarks.report import Report
from benchmarks.trace_replay import Comparison, compare
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.local.plan import ClusterSpec

PARTS = ("lent", "move", "trace", "context")
INSTANCES = (2, 4)
_CONTEXT_BLOCKS = 64
#: Several long requests, one after the other.
_WINDOW_S = 45.0
_QUICK_WINDOW_S = 30.0


@dataclass(slots=True)
class Result:
    """What was measured; empty where it was not asked for."""

    lent: Mapping[int, Rounds] = field(default_factory=dict)
    moving: Mapping[int, Rounds] = field(default_factory=dict)
    traces: dict[int, dict[str, Comparison]] = field(default_factory=dict)
    longest: Mapping[int, Longest] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        two = self.traces.get(INSTANCES[0], {})
        return {
            "lent_step_over_local": {str(c): round(r.ratio, 3) for c, r in self.lent.items()},
            **{f"move_{p}_slowdown": _rounded(self.moving.get(p)) for p in (16, 32)},
            "pooled_over_static": {n: round(two[n].over_static, 2) for n in TAILS if n in two},
            "pooled_over_in_turn": {n: round(two[n].over_in_turn, 2) for n in TAILS if n in two},
            "longest_context_over_one_instance": {
                str(num): round(longest.ratio, 2) for num, longest in self.longest.items()
            },
            "uniform_pooled_over_static": _rounded_ratio(two.get(UNIFORM)),
        }


def _rounded(rounds: Rounds | None) -> float | None:
    return round(rounds.slowdown, 4) if rounds else None


def _rounded_ratio(comparison: Comparison | None) -> float | None:
    return round(comparison.over_static, 3) if comparison else None


async def measure(options: argparse.Namespace, spec: ClusterSpec, report: Report) -> Result:
    result, num_rounds = Result(), 2 if options.quick else 5
    kv_dtype, num_steps = options.kv_dtype, 12 if options.quick else 24
    if "lent" in options.only:
        report.say("decoding with half of the blocks elsewhere")
        result.lent = await measure_lent(spec, kv_dtype, num_rounds, num_steps)
        _show_lent(result.lent, report)
    if "move" in options.only:
        report.say("decoding while blocks move")
        result.moving = await measure_moving(spec, kv_dtype, 2 * num_rounds, num_steps)
        _show_moving(result.moving, report)
    if "trace" in options.only:
        for num in options.instances:
            report.say(f"traces on {num} instances")
            result.traces[num] = await _compare(options, spec, num, report)
            _show_traces(num, result.traces[num], report)
    if "context" in options.only:
        report.say("the longest context")
        result.longest = await measure_longest(small(spec, 2, _CONTEXT_BLOCKS, kv_dtype), INSTANCES)
        _show_longest(result.longest, report)
    return result


async def _compare(
    options: argparse.Namespace, spec: ClusterSpec, num: int, report: Report
) -> dict[str, Comparison]:
    spec = small(spec, num, NUM_BLOCKS, options.kv_dtype, max_running=MAX_BATCH)
    traces = [Trace(name, num, spec.instance_capacity_tokens) for name in options.traces]
    num_repeats, window_s = (1, _QUICK_WINDOW_S) if options.quick else (2, _WINDOW_S)
    return await compare(spec, traces, num_repeats, window_s, report.say)


def small(
    spec: ClusterSpec, num_instances: int, num_blocks: int, kv_dtype: str, **worker: int
) -> ClusterSpec:
    overrides: dict[str, dict[str, object]] = {
        "worker": {"kv_dtype": kv_dtype, "queue_timeout_s": 300, **worker},
        "router": {"queue_timeout_s": 300},
    }
    return replace(spec, num_instances=num_instances, num_blocks=num_blocks, overrides=overrides)


def _show_lent(lent: Mapping[int, Rounds], report: Report) -> None:
    report.table(
        "Half of the blocks at an idle peer, batch 1",
        ("context", "local ms", "lent over local", "rounds"),
        [
            (str(context), f"{r.before_s * 1e3:.1f}", f"{r.ratio:.3f}", _each(r))
            for context, r in lent.items()
        ],
    )


def _show_moving(moving: Mapping[int, Rounds], report: Report) -> None:
    report.table(
        "Blocks move meanwhile, batch 8, context 1,024",
        ("tokens a step", "step ms without", "slowdown", "rounds"),
        [
            (str(pace), f"{r.before_s * 1e3:.1f}", f"{r.slowdown:+.1%}", _each(r))
            for pace, r in moving.items()
        ],
    )


def _each(rounds: Rounds) -> str:
    return " ".join(f"{steps.ratio:.3f}" for steps in rounds.rounds)


def _show_traces(num: int, compared: Mapping[str, Comparison], report: Report) -> None:
    def cells(name: str, c: Comparison) -> tuple[str, ...]:
        sides = [
            " ".join(f"{r.tokens_per_s:.0f} ({r.num_long_served})" for r in replays)
            for replays in (c.in_turn, c.static, c.pooled)
        ]
        return name, *sides, f"{c.over_static:.2f}", f"{c.over_in_turn:.2f}"

    report.table(
        f"{num} instances: generated tokens/s (long requests served)",
        ("trace", "in turn", "static", "pooled", "pooled over static", "over in turn"),
        [cells(name, comparison) for name, comparison in compared.items()],
    )


def _show_longest(longest: Mapping[int, Longest], report: Report) -> None:
    report.table(
        "The longest request",
        ("instances", "tokens", "on one", "ratio"),
        [
            (str(num), str(of.num_tokens), str(of.one_instance_tokens), f"{of.ratio:.2f}")
            for num, of in longest.items()
        ],
    )


def plot(result: Result, path: Path) -> None:
    """Every bar is a ratio: with pooling over without."""
    steps = {f"half lent, {context}": r.ratio for context, r in result.lent.items()}
    steps |= {f"moving {pace}": r.ratio for pace, r in result.moving.items()}
    panels: dict[str, tuple[Sequence[str], Series]] = {}
    if steps:
        panels["a decode step"] = (list(steps), {"over all blocks here": list(steps.values())})
    if result.traces:
        series = {
            f"{num} instances, over {name.replace('_', ' ')}": [
                getattr(compared, f"over_{name}") for compared in traces.values()
            ]
            for num, traces in result.traces.items()
            for name in ("static", "in_turn")
        }
        panels["tokens/s of a trace, pooled"] = (
            list(next(iter(result.traces.values()))),
            series,
        )
    if result.longest:
        ratios = [of.ratio for of in result.longest.values()]
        labels = [f"{num} instances" for num in result.longest]
        panels["the longest request"] = (labels, {"over that of one instance": ratios})
    grouped_bars(path, panels)


def some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        wanted = tuple(text.split(","))
        if not set(wanted) <= set(names):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {','.join(names)}")
        return wanted

    return parse


def main(arguments: list[str]) -> None:
    parser, report = new_parser("pooling", __doc__), Report()
    for option, names in (("--only", PARTS), ("--traces", (UNIFORM, *TAILS))):
        parser.add_argument(
            option, type=some_of(names), default=names, help=f"some of {','.join(names)}"
        )
    parser.add_argument(
        "--instances", type=int, nargs="+", default=INSTANCES, help="of the traces' clusters"
    )
    parser.add_argument("--plot", type=Path, help="where to draw the ratios (SVG)")
    parser.set_defaults(dtype="bfloat16", kv_dtype="bfloat16", threads=1)
    options = parser.parse_args(arguments)
    report.machine(options.threads)
    spec = ClusterSpec(
        model=resolve(DEFAULT_MODEL, default_cache_dir(os.environ), report.say),
        model_name=DEFAULT_MODEL,
        dtype=options.dtype,
        num_cores=options.threads,
        cores=tuple(sorted(os.sched_getaffinity(0))),
    )
    result = asyncio.run(measure(options, spec, report))
    if options.plot:
        plot(result, options.plot)
    report.machine(options.threads)
    report.last_line(result.to_json())


if __name__ == "__main__":
    sys.exit(run(main))
