"""`python -m benchmarks.perf_model`: what the performance model predicts, against the real engine.

The worker measures the model's constants at start, and refines them from its own steps. Here the
engine decodes at a few (batch, context) points, of which the model learns as a worker does, and
between them at a grid of others, which the model has to predict.
"""

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.command import new_parser, run
from benchmarks.engine_rig import EngineRig, running
from benchmarks.report import Report
from benchmarks.workload import Workload
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.worker.config import Config
from services.worker.core import Core, build_core
from services.worker.engine.engine import EngineSnapshot
from services.worker.perf_estimator import PerfEstimator, StepConstants, step_constants
from services.worker.profiling import measure_compute

_PATIENCE_S = 3600.0
_NUM_WARMUP_STEPS = 3
_NUM_STEPS = 15
#: Generated until the measured steps begin, and after them, at most.
_SPARE_TOKENS = 160


class Point(NamedTuple):
    batch: int
    context: int


#: Every kind of step at least once, a few batches with short and long contexts.
LEARNT = tuple(
    Point(*at) for at in ((1, 128), (1, 2048), (4, 512), (8, 128), (8, 512), (16, 256), (32, 128))
)
CONTEXTS = (128, 512, 2048)
#: Beyond, prompts take minutes.
_MAX_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Measured:
    point: Point
    step_s: float
    """From tokens to tokens, the median."""
    snapshots: list[EngineSnapshot]

    @property
    def attended_tokens(self) -> int:
        return round(statistics.median(s.running_tokens for s in self.snapshots))

    def error_of(self, constants: StepConstants) -> float:
        """Of the predicted throughput, as a share of the measured one."""
        return self.step_s / constants.step_s(self.point.batch, self.attended_tokens) - 1


@dataclass(frozen=True, slots=True)
class Result:
    learnt: list[Measured]
    measured: list[Measured]
    at_start: StepConstants
    refined: StepConstants

    def errors(self, constants: StepConstants) -> list[float]:
        return [abs(measured.error_of(constants)) for measured in self.measured]


def grid(max_tokens: int) -> list[Point]:
    points = (Point(batch, context) for batch in (1, 2, 4, 8, 16, 32) for context in CONTEXTS)
    return [p for p in points if p.batch * p.context <= max_tokens and p not in LEARNT]


def decode(rig: EngineRig, point: Point) -> Measured:
    prompts = Workload().prompts(point.batch, point.context - _NUM_STEPS, seed=point.context)
    rig.start(prompts, point.batch + _SPARE_TOKENS)
    while rig.step() < point.batch:
        pass  # prompts are still being computed
    for _ in range(_NUM_WARMUP_STEPS):
        rig.step()
    times_s, snapshots = [], []
    for _ in range(_NUM_STEPS):
        started_s = time.perf_counter()
        rig.step()
        times_s.append(time.perf_counter() - started_s)
        snapshots.append(rig.engine.snapshot)
    rig.finish()
    return Measured(point, statistics.median(times_s), snapshots)


def measure(options: argparse.Namespace, report: Report) -> Result:
    points = grid(_MAX_TOKENS // 4 if options.quick else _MAX_TOKENS)
    core, config = _core(options, report)
    start = step_constants(measure_compute(core.model, core.kernels, core.storage))
    with running(EngineRig(config, core)) as rig:
        decode(rig, Point(1, 256))  # warm up
        order = [*LEARNT, *points]
        # Mixed, so that a machine that slows down meanwhile does so for both.
        random.Random(0).shuffle(order)
        decoded = {point: decode(rig, point) for point in order}
    learnt = [decoded[point] for point in LEARNT]
    measured = [decoded[point] for point in points]
    return Result(learnt, measured, start, _learn(start, learnt))


def _learn(start: StepConstants, learnt: list[Measured]) -> StepConstants:
    """From steps in a mixed order, as they come in life."""
    estimator = PerfEstimator(start)
    snapshots = [snapshot for measured in learnt for snapshot in measured.snapshots]
    random.Random(0).shuffle(snapshots)
    for seen in snapshots:
        if seen.step_tokens == seen.num_running:
            estimator.observe(seen.num_running, seen.running_tokens, seen.step_s)
    return estimator.constants


def _core(options: argparse.Namespace, report: Report) -> tuple[Core, Config]:
    defaults = Config(inst_id=0, model=DEFAULT_MODEL)
    points = (*LEARNT, *grid(_MAX_TOKENS))
    most_tokens = max(p.batch * (p.context + p.batch + _SPARE_TOKENS) for p in points)
    config = replace(
        defaults,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        num_threads=options.threads,
        num_blocks=most_tokens // defaults.block_size + 64,
        queue_timeout_s=_PATIENCE_S,
    )
    folder = resolve(DEFAULT_MODEL, default_cache_dir(os.environ), report.say)
    return build_core(config, folder), config


def show(result: Result, report: Report) -> None:
    _show(result.learnt, "Learnt from", result, report)
    _show(result.measured, "Predicted", result, report)


def _show(points: list[Measured], title: str, result: Result, report: Report) -> None:
    report.table(
        title,
        ("batch", "context", "tokens/s", "error at start", "error refined"),
        [
            (
                str(measured.point.batch),
                str(measured.point.context),
                f"{measured.point.batch / measured.step_s:.1f}",
                f"{measured.error_of(result.at_start):+.1%}",
                f"{measured.error_of(result.refined):+.1%}",
            )
            for measured in points
        ],
    )


def main(arguments: list[str]) -> None:
    parser, report = new_parser("perf_model", __doc__), Report()
    options = parser.parse_args(arguments)
    report.machine(options.threads)
    result = measure(options, report)
    show(result, report)
    refined, at_start = result.errors(result.refined), result.errors(result.at_start)
    report.last_line(
        {
            "median_error": round(statistics.median(refined), 4),
            "worst_error": round(max(refined), 4),
            "median_error_at_start": round(statistics.median(at_start), 4),
            "worst_error_at_start": round(max(at_start), 4),
        }
    )


if __name__ == "__main__":
    sys.exit(run(main))
