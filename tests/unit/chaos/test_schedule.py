from itertools import pairwise

import pytest

from tests.chaos.schedule import Fault, Kind, Schedule, draw_schedule

NUM_WORKERS, NUM_GMANAGERS = 3, 2
FIVE_MINUTES_S = 300.0


def draw(seed: int, duration_s: float = FIVE_MINUTES_S) -> Schedule:
    return draw_schedule(seed, duration_s, NUM_WORKERS, NUM_GMANAGERS)


def test_a_seed_draws_the_same_faults_again() -> None:
    assert draw(7) == draw(7) != draw(8)


def test_a_shorter_run_begins_like_a_longer_one() -> None:
    short, long = draw(7, 60.0), draw(7)
    assert long.workers[: len(short.workers)] == short.workers
    assert long.control[: len(short.control)] == short.control


@pytest.mark.parametrize("seed", range(20))
def test_five_minutes_bring_every_kind(seed: int) -> None:
    assert {fault.kind for fault in draw(seed).all} == set(Kind)


@pytest.mark.parametrize("seed", range(20))
def test_drains_take_every_worker_one_after_the_other(seed: int) -> None:
    victims = [fault.victim for fault in draw(seed).workers if fault.kind is Kind.DRAIN_WORKER]
    assert set(victims[:NUM_WORKERS]) == set(range(NUM_WORKERS))


@pytest.mark.parametrize("seed", range(20))
def test_in_a_track_one_fault_follows_the_other(seed: int) -> None:
    for track in (draw(seed).workers, draw(seed).control):
        assert all(one.at_s + one.for_s < next_.at_s for one, next_ in pairwise(track))
        assert track[-1].at_s < FIVE_MINUTES_S


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_is_between_two(seed: int) -> None:
    assert all(f.victim != f.other for f in draw(seed).workers if f.kind is Kind.CUT)


def test_a_fault_says_what_it_does() -> None:
    cut = Fault(12.0, Kind.CUT, 3.5, 0, 2)
    assert str(cut) == "  12.0 s  cut the network between workers 0 and 2 for 3.5 s"
    assert str(Fault(1.0, Kind.KILL_REDIS, 0.5)) == "   1.0 s  kill redis for 0.5 s"
