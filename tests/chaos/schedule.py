"""Which faults happen when, drawn from one seed, so that a run can be repeated. Pure.

Who is a creditor or an owner at that moment only the run knows; everything else is drawn here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Kind(StrEnum):
    KILL_CREDITOR = "kill the largest creditor"
    KILL_OWNER = "kill the owner of most"
    STOP_WORKER = "stop worker"
    CUT = "cut the network between workers"
    DRAIN_WORKER = "drain and restart worker"
    KILL_GMANAGER = "kill gmanager"
    KILL_REDIS = "kill redis"


@dataclass(frozen=True, slots=True)
class Fault:
    """Begins at `at_s`, or once the one before it is over, and is undone after `for_s`.

    `victim` and `other` are numbers of workers or gManagers, where the kind leaves a choice.
    """

    at_s: float
    kind: Kind
    for_s: float
    victim: int = 0
    other: int = 0

    def __str__(self) -> str:
        numbers = {
            Kind.STOP_WORKER: f" {self.victim}",
            Kind.DRAIN_WORKER: f" {self.victim}",
            Kind.KILL_GMANAGER: f" {self.victim}",
            Kind.CUT: f" {self.victim} and {self.other}",
        }
        return f"{self.at_s:6.1f} s  {self.kind}{numbers.get(self.kind, '')} for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Two tracks that know nothing of each other; in each one fault follows the other."""

    workers: tuple[Fault, ...]
    control: tuple[Fault, ...]

    @property
    def all(self) -> tuple[Fault, ...]:
        return self.workers + self.control


def draw_schedule(seed: int, duration_s: float, num_workers: int, num_gmanagers: int) -> Schedule:
    def worker_faults(random: Random) -> Iterator[Fault]:
        """Every kind once in a random order, again and again; the drains take all workers."""
        kinds = [Kind.KILL_CREDITOR, Kind.KILL_OWNER, Kind.STOP_WORKER, Kind.CUT, Kind.DRAIN_WORKER]
        while True:
            for kind in random.sample(kinds, len(kinds)):
                victims = random.sample(range(num_workers), num_workers)
                num_faults = num_workers if kind is Kind.DRAIN_WORKER else 1
                for first, second in zip(victims[:num_faults], victims[1:] + victims, strict=False):
                    yield Fault(0.0, kind, _duration_s(random, kind), first, second)

    def control_faults(random: Random) -> Iterator[Fault]:
        while True:
            kind = random.choice((Kind.KILL_GMANAGER, Kind.KILL_REDIS))
            victim = random.randrange(num_gmanagers)
            yield Fault(0.0, kind, _duration_s(random, kind), victim)

    # Of their own, so that a shorter run begins like a longer one.
    for_workers, for_control = Random(f"{seed} workers"), Random(f"{seed} control")
    return Schedule(
        _timed(worker_faults(for_workers), lambda: for_workers.uniform(2.0, 8.0), duration_s),
        _timed(control_faults(for_control), lambda: for_control.uniform(5.0, 15.0), duration_s),
    )


def _duration_s(random: Random, kind: Kind) -> float:
    """Of a stop and a cut: from nothing at all to longer than leases and the router's patience."""
    longest_s = 12.0 if kind in (Kind.STOP_WORKER, Kind.CUT) else 3.0
    return round(random.uniform(0.0, longest_s), 1)


def _timed(
    faults: Iterator[Fault], pause_s: Callable[[], float], duration_s: float
) -> tuple[Fault, ...]:
    timed: list[Fault] = []
    at_s = 0.0
    for fault in faults:
        at_s = round(at_s + pause_s(), 1)
        if at_s >= duration_s:
            break
        timed.append(Fault(at_s, fault.kind, fault.for_s, fault.victim, fault.other))
        at_s += fault.for_s
    return tuple(timed)
