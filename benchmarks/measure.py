"""Times any engine on a workload, each in the same way. Plain Python: peers run it, too."""

import statistics
import time
from typing import Protocol

from benchmarks.workload import Figures, Workload


class Subject(Protocol):
    """An engine under test. Greedy; prompts and answers are token ids; nothing ends by itself."""

    def start(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Hand all requests over at once."""
        ...

    def step(self) -> int:
        """Wait until a step has brought tokens; how many."""
        ...

    def finish(self) -> None:
        """Forget all requests."""
        ...


def measure(subject: Subject, workload: Workload) -> Figures:
    decode_step_s(subject, workload, batch=1)  # warm up
    return Figures(
        {batch: decode_step_s(subject, workload, batch) for batch in workload.decode_batches},
        {num_tokens: prefill_s(subject, workload, num_tokens)
         for num_tokens in workload.prefill_tokens},
    )  # fmt: skip


def decode_step_s(subject: Subject, workload: Workload, batch: int) -> float:
    """The median step in which all of `batch` sequences decode.

    The median, so that a step that something else on the machine disturbed does not count.
    """
    prompts = workload.prompts(batch, workload.prompt_tokens, seed=0)
    subject.start(prompts, workload.max_new_tokens)
    while subject.step() < batch:
        pass  # prompts are still being computed
    for _ in range(workload.num_warmup_steps):
        subject.step()
    times = []
    for _ in range(workload.num_steps):
        times.append(_timed_step(subject))
    subject.finish()
    return statistics.median(times)


def prefill_s(subject: Subject, workload: Workload, num_tokens: int) -> float:
    """From handing one prompt over to its first token: the median of a few, all different."""
    times = []
    for seed in range(workload.num_prefills):
        (prompt,) = workload.prompts(1, num_tokens, seed)
        started = time.perf_counter()
        subject.start([prompt], max_new_tokens=1)
        subject.step()
        times.append(time.perf_counter() - started)
        subject.finish()
    return statistics.median(times)


def _timed_step(subject: Subject) -> float:
    started = time.perf_counter()
    subject.step()
    return time.perf_counter() - started
