"""A process that keeps dying is restarted ever more slowly; one that held starts over."""

from services.local.watchdog import BackOff


def delays(ran_s: list[float]) -> list[float]:
    back_off = BackOff(first_s=1, max_s=5, held_s=60)
    result: list[float] = []
    for seconds in ran_s:
        result.append(back_off.next_delay_s(result[-1] if result else 0, seconds))
    return result


def test_delays_double_up_to_a_bound() -> None:
    assert delays([0, 0, 0, 0, 0]) == [1, 2, 4, 5, 5]


def test_a_start_that_held_begins_anew() -> None:
    assert delays([0, 0, 0, 61, 0]) == [1, 2, 4, 1, 2]
