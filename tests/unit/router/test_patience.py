"""Waits end at their own limit or when the router has to, whichever comes first."""

import asyncio

import pytest

from services.common.errors import DeadlineExceeded, Unavailable
from services.router.patience import Patience

LATE = DeadlineExceeded("late")


async def test_what_waits_ends_with_the_router() -> None:
    patience = Patience()

    async def wait() -> None:
        async with patience.limit(60.0, LATE):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    patience.end_by(asyncio.get_running_loop().time())
    with pytest.raises(Unavailable):
        await waiting
    assert patience.is_over


async def test_the_router_ends_while_a_wait_is_just_running_out() -> None:
    patience, is_cancelled, is_clean = Patience(), asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        async with patience.limit(0.0, LATE):
            try:
                await asyncio.Event().wait()
            finally:
                is_cancelled.set()
                await is_clean.wait()

    waiting = asyncio.create_task(wait())
    await is_cancelled.wait()
    patience.end_by(asyncio.get_running_loop().time() + 60.0)
    is_clean.set()
    with pytest.raises(DeadlineExceeded):
        await waiting
