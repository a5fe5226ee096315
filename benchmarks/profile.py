"""Where a step's time goes: the engine's own functions, timed from outside while a decode runs.

It costs a running engine nothing: what is timed is replaced while a profile is taken, no longer.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.engine_rig import EngineRig
from benchmarks.measure import decode_step_s
from benchmarks.workload import Workload
from kernels.native.decoder import NativeDecoder
from services.worker.engine import runner
from services.worker.engine.attention import RemoteAttention
from services.worker.engine.engine import Engine
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.step_tensors import StepTensors

OVERHEAD_PHASES = ("schedule", "metadata", "sampling", "hand-over")
PHASES = (*OVERHEAD_PHASES, "attention", "layers", "lm_head")
REST = "rest"
"""The embedding, and Python between the others."""

#: Whose time belongs to which phase. None of them calls another.
TIMED: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "postprocess", "schedule"),
    (runner, "_logits_rows", "metadata"),
    (runner, "_remote_rows", "metadata"),
    (StepTensors, "fill", "metadata"),
    (RemoteAttention, "begin", "attention"),
    (NativeDecoder, "logits", "lm_head"),
    (NativeDecoder, "likeliest", "sampling"),
    (runner, "sample", "sampling"),
    (Engine, "_publish", "hand-over"),
)


class StepClock:
    """The seconds of each step by phase."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._current: defaultdict[str, float] = defaultdict(float)

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """`function`, adding the time of its calls to `phase`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            elapsed_s = time.perf_counter() - started
            self._current[phase] += elapsed_s
            return result

        return call

    def layers(self, function: Callable[..., None]) -> Callable[..., None]:
        """A decoder's `run`, of whose time it knows itself what attention took."""

        def call(decoder: NativeDecoder, *args: Any) -> None:
            started, attention_s = time.perf_counter(), decoder.attention_s
            function(decoder, *args)
            elapsed_s, attention_s = (
                time.perf_counter() - started,
                decoder.attention_s - attention_s,
            )
            self._current["attention"] += attention_s
            self._current["layers"] += elapsed_s - attention_s

        return call

    def step(self, function: Callable[..., bool]) -> Callable[..., bool]:
        """`function`, whose every call is a step; a step that ran nothing does not count."""

        def call(*args: Any, **kwargs: Any) -> bool:
            self._current.clear()
            started = time.perf_counter()
            ran = function(*args, **kwargs)
            if ran:
                elapsed_s = time.perf_counter() - started
                self._current[REST] = elapsed_s - sum(self._current.values())
                self.steps.append(dict(self._current))
            return ran

        return call


@contextmanager
def timed_engine(clock: StepClock) -> Iterator[None]:
    with ExitStack() as replaced:
        for owner, name, phase in TIMED:
            replaced.enter_context(_replaced(owner, name, clock.timed(getattr(owner, name), phase)))
        replaced.enter_context(_replaced(NativeDecoder, "run", clock.layers(NativeDecoder.run)))
        replaced.enter_context(_replaced(Engine, "_step", clock.step(Engine._step)))
        yield


def profile_decode(rig: EngineRig, workload: Workload, batch: int) -> dict[str, float]:
    """Seconds of a decode step by phase, each the median over the measured steps."""
    clock = StepClock()
    with timed_engine(clock):
        decode_step_s(rig, workload, batch)
        # What comes before them are the prompts; once the batch decodes, every step is alike.
        steps = clock.steps[-workload.num_steps :]
    return {
        phase: statistics.median(step.get(phase, 0.0) for step in steps)
        for phase in (*PHASES, REST)
    }


@contextmanager
def _replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
