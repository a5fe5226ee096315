"""Only steps in which the whole batch decodes are timed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import measure as measure_module
from benchmarks.measure import decode_step_s, measure, prefill_s
from benchmarks.workload import Workload

_PREFILL_S = 3.0
_WORKLOAD = replace(
    Workload(), decode_batches=(1, 4), context_tokens=32, prefill_tokens=(64,), num_steps=5
)


class FakeEngine:
    """Finishes one prompt a step while the others decode; its time is its own."""

    def __init__(self, disturbed_step: int | None = None) -> None:
        self.now_s = 0.0
        self.started: list[tuple[int, int]] = []
        self.num_unfinished = 0
        self._disturbed_step = disturbed_step
        self._num_decoding = 0
        self._num_steps = 0

    def start(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        self.started.append((len(prompts), len(prompts[0])))
        self.num_unfinished = len(prompts)
        self._num_decoding = 0

    def step(self) -> int:
        self._num_steps += 1
        if self._num_decoding < self.num_unfinished:
            self._num_decoding += 1
            self.now_s += _PREFILL_S
        else:
            self.now_s += 0.01 * self._num_decoding
        if self._num_steps == self._disturbed_step:
            self.now_s += 100.0
        return self._num_decoding

    def finish(self) -> None:
        self.num_unfinished = 0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    return _on_its_own_time(FakeEngine(), monkeypatch)


def _on_its_own_time(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    clock = SimpleNamespace(perf_counter=lambda: engine.now_s)
    monkeypatch.setattr(measure_module, "time", clock)
    return engine


def test_a_decode_step_is_timed_without_the_prompts(engine: FakeEngine) -> None:
    assert decode_step_s(engine, _WORKLOAD, batch=4) == pytest.approx(0.04)
    assert engine.started == [(4, _WORKLOAD.prompt_tokens)]
    assert engine.num_unfinished == 0


def test_one_disturbed_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # Four steps for the prompts, then the steps to warm up, then the measured ones.
    disturbed = FakeEngine(disturbed_step=4 + _WORKLOAD.num_warmup_steps + 2)
    engine = _on_its_own_time(disturbed, monkeypatch)
    assert decode_step_s(engine, _WORKLOAD, batch=4) == pytest.approx(0.04)


def test_a_prefill_is_timed_to_its_first_token(engine: FakeEngine) -> None:
    assert prefill_s(engine, _WORKLOAD, 64) == pytest.approx(_PREFILL_S)
    assert engine.started == [(1, 64)] * _WORKLOAD.num_prefills


def test_every_batch_and_prompt_of_the_workload_is_measured(engine: FakeEngine) -> None:
    figures = measure(engine, _WORKLOAD)
    assert figures.step_s == {1: pytest.approx(0.01), 4: pytest.approx(0.04)}
    assert figures.prefill_s == {64: pytest.approx(_PREFILL_S)}
