"""`python -m benchmarks.compare`: the worker's engine beside vLLM and llama.cpp.

Each runs alone, one after the other, on the same cores with as many threads, on the same prompts.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.command import new_parser, run
from benchmarks.peers.environment import LLAMACPP, VLLM, Peer, PeerUnavailable, ensure
from benchmarks.peers.task import Task
from benchmarks.plots import Series, grouped_bars
from benchmarks.report import Report
from benchmarks.workload import Figures, Workload
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve

_ROOT = Path(__file__).parent.parent
_RUN_DEADLINE_S = 3600.0

#: Figures by the name of what was run; None where a peer was not to be had.
Runs = Mapping[str, Figures | None]
RatesOf = Callable[[Figures], dict[int, float]]

OURS = "ours"
#: The fastest here, and the one that vLLM is fastest in, for a look at the same weights.
OUR_DTYPES = ("quantized", "bfloat16")
PEERS = (VLLM, LLAMACPP)


def main(arguments: list[str]) -> None:
    parser, report = new_parser("compare", __doc__), Report()
    parser.set_defaults(dtype=None, kv_dtype="bfloat16")
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names, help="beside whom")
    parser.add_argument("--plot", type=Path, help="where to draw the rates (SVG)")
    options = parser.parse_args(arguments)
    cache_dir = default_cache_dir(os.environ)
    workload = Workload.quick() if options.quick else Workload()
    folder = resolve(DEFAULT_MODEL, cache_dir, report.say)
    peers = [peer for peer in PEERS if peer.name in options.peers]
    pythons = {peer: _python_of(peer, cache_dir, report) for peer in peers}

    report.machine(options.threads)
    ours = {dtype: _run_ours(options, dtype, report) for dtype in _dtypes(options)}
    runs: dict[str, Figures | None] = {
        f"{OURS} {dtype}": Figures.from_json(json.dumps(result)) for dtype, result in ours.items()
    }
    for peer, python in pythons.items():
        for variant in peer.variants:
            task = Task(folder, variant, options.threads, workload)
            runs[f"{peer.name} {variant}"] = (
                _run_peer(peer, python, task, report) if python else None
            )
    report.machine(options.threads)
    _show(runs, report)
    if options.plot:
        _plot(runs, options.plot)
    key = "step_over_weight_read_at_batch_1"
    quickest = min(ours.values(), key=lambda result: result["step_s"]["1"])
    report.last_line(ratios(runs) | {key: quickest[key]})


def ratios(runs: Runs) -> dict[str, Any]:
    """How many times as fast as each peer ours is; null where the peer did not run."""
    return {
        "decode_over_vllm": _over(runs, VLLM, _decode),
        "decode_over_llamacpp": _over(runs, LLAMACPP, _decode),
        "prefill_over_vllm": _over(runs, VLLM, _prefill),
        "prefill_over_llamacpp": _over(runs, LLAMACPP, _prefill),
    }


def _decode(figures: Figures) -> dict[int, float]:
    return figures.decode_tokens_per_s


def _prefill(figures: Figures) -> dict[int, float]:
    return figures.prefill_tokens_per_s


def _over(runs: Runs, peer: Peer, rates_of: RatesOf) -> dict[str, float | None]:
    """The fastest of our types over the fastest of the peer's variants, figure by figure."""
    ours, peers = _fastest(runs, OURS, rates_of), _fastest(runs, peer.name, rates_of)
    return {str(key): round(ours[key] / peers[key], 2) if peers else None for key in ours}


def _fastest(runs: Runs, engine: str, rates_of: RatesOf) -> dict[int, float]:
    """Nothing where the engine did not run."""
    ran = [rates_of(f) for name, f in runs.items() if f and name.split()[0] == engine]
    return {key: max(rates[key] for rates in ran) for key in (ran[0] if ran else ())}


def _dtypes(options: argparse.Namespace) -> tuple[str, ...]:
    return (options.dtype,) if options.dtype else OUR_DTYPES


def _run_ours(options: argparse.Namespace, dtype: str, report: Report) -> dict[str, Any]:
    report.say(f"running ours, {dtype}, KVCache {options.kv_dtype}")
    command = [sys.executable, "-m", "benchmarks.decode", f"--dtype={dtype}",
               f"--kv-dtype={options.kv_dtype}", f"--threads={options.threads}"]  # fmt: skip
    if options.quick:
        command.append("--quick")
    done = subprocess.run(
        command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=_RUN_DEADLINE_S, check=True
    )
    result: dict[str, Any] = json.loads(last_json_line(done.stdout))
    return result


def _run_peer(peer: Peer, python: Path, task: Task, report: Report) -> Figures | None:
    name = f"{peer.name} {task.variant}"
    report.say(f"running {name}")
    log = python.parent.parent / f"run-{task.variant}.log"
    command = [str(python), "-m", peer.script, *task.arguments()]
    with log.open("w", encoding="utf-8") as errors:
        try:
            done = subprocess.run(
                command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
                timeout=_RUN_DEADLINE_S, check=True,
            )  # fmt: skip
            return Figures.from_json(last_json_line(done.stdout))
        except (subprocess.SubprocessError, ValueError) as error:
            report.say(f"{name} did not run: {_reason(error, log)} (see {log})")
            return None


def _reason(error: Exception, log: Path) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took over {_RUN_DEADLINE_S:.0f} s"
    if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:
        return f"killed by {signal.Signals(-error.returncode).name}"
    lines = reversed(log.read_text(encoding="utf-8").splitlines())
    return next((line for line in lines if line.strip()), str(error))


def _python_of(peer: Peer, cache_dir: Path, report: Report) -> Path | None:
    try:
        return ensure(peer, cache_dir, report.say)
    except PeerUnavailable as error:
        report.say(f"{peer.name} cannot be installed: {error}")
        return None


def last_json_line(output: str) -> str:
    """Peers print all sorts of things around their answer."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise ValueError("no figures in the output")
    return lines[-1]


def _show(runs: Runs, report: Report) -> None:
    def rows(of: RatesOf) -> list[tuple[str, ...]]:
        return [
            (name, *(f"{rate:.1f}" for rate in of(figures).values()))
            if figures
            else (name, "not run")
            for name, figures in runs.items()
        ]

    workload = Workload()
    report.table(
        f"Decode, tokens/s at context {workload.context_tokens}",
        ("engine", *(f"batch {batch}" for batch in workload.decode_batches)),
        rows(_decode),
    )
    report.table(
        "Prefill, tokens/s",
        ("engine", *(f"{num_tokens} tokens" for num_tokens in workload.prefill_tokens)),
        rows(_prefill),
    )


def _plot(runs: Runs, path: Path) -> None:
    ran = {name: figures for name, figures in runs.items() if figures}

    def panel(of: RatesOf, unit: str) -> tuple[list[str], Series]:
        labels = [f"{key}{unit}" for key in of(next(iter(ran.values())))]
        return labels, {name: list(of(figures).values()) for name, figures in ran.items()}

    grouped_bars(
        path,
        {
            "Decode, tokens/s by batch": panel(_decode, ""),
            "Prefill, tokens/s by prompt": panel(_prefill, " tokens"),
        },
    )


if __name__ == "__main__":
    sys.exit(run(main))
