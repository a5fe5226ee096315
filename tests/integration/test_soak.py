"""The soak of `make soak`, for two minutes."""

import pytest

from tests.soak.__main__ import soak

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(420)]


async def test_two_minutes_of_random_use_leave_nothing_wrong_and_nothing_behind() -> None:
    tally = await soak(minutes=2.0, seed=20260, num_instances=2)
    assert tally.is_clean, tally
    assert tally.requests > 20
    assert tally.aborted > 0
    assert tally.forced_moves > 0
