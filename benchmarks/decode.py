"""`python -m benchmarks.decode`: the worker's engine alone, beside what its memory can deliver.

Decode and prefill rates of the built-in model, and how near a step at batch 1 comes to the time
that reading the weights once takes.
"""

import argparse
import os
import sys
from dataclasses import dataclass, replace

from benchmarks.bandwidth import read_bytes_per_s
from benchmarks.command import new_parser, run
from benchmarks.engine_rig import EngineRig, running
from benchmarks.measure import measure
from benchmarks.profile import OVERHEAD_PHASES, profile_decode
from benchmarks.report import Report, rounded
from benchmarks.workload import Figures, Workload
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.worker.config import Config
from services.worker.core import build_core

#: Longer than the prompts of the largest batch take on any machine.
_PATIENCE_S = 3600.0

Profile = dict[int, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Result:
    dtype: str
    num_threads: int
    read_bytes_per_s: float
    weight_bytes: int
    figures: Figures
    profile: Profile

    @property
    def weight_read_s(self) -> float:
        return self.weight_bytes / self.read_bytes_per_s

    @property
    def step_over_weight_read(self) -> float:
        return self.figures.step_s[1] / self.weight_read_s


def measure_engine(options: argparse.Namespace, report: Report) -> Result:
    folder = resolve(DEFAULT_MODEL, default_cache_dir(os.environ), report.say)
    workload = Workload.quick() if options.quick else Workload()
    rate = read_bytes_per_s(options.threads)
    config = _config(options, workload)
    core = build_core(config, folder)
    with running(EngineRig(config, core)) as rig:
        figures = measure(rig, workload)
        batches = workload.decode_batches if options.profile else ()
        profile = {batch: profile_decode(rig, workload, batch) for batch in batches}
    num_bytes = core.model.weight_bytes
    return Result(options.dtype, options.threads, rate, num_bytes, figures, profile)


def _config(options: argparse.Namespace, workload: Workload) -> Config:
    """A worker's own defaults, but for room and patience enough for the workload."""
    defaults = Config(inst_id=0, model=DEFAULT_MODEL)
    return replace(
        defaults,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        num_threads=options.threads,
        num_blocks=workload.blocks_needed(defaults.block_size),
        queue_timeout_s=_PATIENCE_S,
    )


def show(result: Result, report: Report) -> None:
    figures = result.figures
    report.table(
        f"Decode, {result.dtype}, context {Workload().context_tokens}",
        ("batch", "tokens/s", "step ms"),
        [
            (str(batch), f"{rate:.1f}", f"{figures.step_s[batch] * 1e3:.1f}")
            for batch, rate in figures.decode_tokens_per_s.items()
        ],
    )
    report.table(
        f"Prefill, {result.dtype}",
        ("prompt tokens", "tokens/s", "seconds"),
        [
            (str(num_tokens), f"{rate:.0f}", f"{figures.prefill_s[num_tokens]:.2f}")
            for num_tokens, rate in figures.prefill_tokens_per_s.items()
        ],
    )
    if result.profile:
        _show_profile(result.profile, report)
    report.say(
        f"Memory is read at {result.read_bytes_per_s / 1e9:.1f} GB/s; reading the weights "
        f"({result.weight_bytes / 1e6:.0f} MB) once takes {result.weight_read_s * 1e3:.1f} ms; "
        f"a step at batch 1 takes {result.step_over_weight_read:.2f} times that."
    )


def _show_profile(profile: Profile, report: Report) -> None:
    totals = {batch: sum(phases.values()) for batch, phases in profile.items()}
    phases = next(iter(profile.values()))
    rows = [
        (phase, *(_cell(spent[phase], totals[batch]) for batch, spent in profile.items()))
        for phase in phases
    ]
    overheads = {
        batch: sum(spent[phase] for phase in OVERHEAD_PHASES) for batch, spent in profile.items()
    }
    rows.append(("step", *(_cell(total, total) for total in totals.values())))
    rows.append(("engine overhead", *(_cell(s, totals[batch]) for batch, s in overheads.items())))
    columns = ("ms and share of a step", *(f"batch {batch}" for batch in profile))
    report.table("Where a decode step's time goes", columns, rows)


def _cell(seconds: float, total_s: float) -> str:
    return f"{seconds * 1e3:.2f} {seconds / total_s:4.0%}"


def to_json(result: Result) -> dict[str, object]:
    return {
        "dtype": result.dtype,
        "threads": result.num_threads,
        "load_average": round(os.getloadavg()[0], 2),
        "decode_tokens_per_s": rounded(result.figures.decode_tokens_per_s),
        "prefill_tokens_per_s": rounded(result.figures.prefill_tokens_per_s),
        "step_s": rounded(result.figures.step_s, 5),
        "prefill_s": rounded(result.figures.prefill_s, 4),
        "read_gb_per_s": round(result.read_bytes_per_s / 1e9, 2),
        "weight_read_s": round(result.weight_read_s, 5),
        "step_over_weight_read_at_batch_1": round(result.step_over_weight_read, 3),
    }


def main(arguments: list[str]) -> None:
    parser, report = new_parser("decode", __doc__), Report()
    parser.add_argument("--profile", action="store_true", help="show where a step's time goes")
    options = parser.parse_args(arguments)
    report.machine(options.threads)
    result = measure_engine(options, report)
    show(result, report)
    report.last_line(to_json(result))


if __name__ == "__main__":
    sys.exit(run(main))
