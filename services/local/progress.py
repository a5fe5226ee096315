"""Progress lines for people: what is going on, and for how long already."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_TICK_S = 5.0


class Progress:
    """Writes one line when a step begins, one every few seconds, and one when it is done."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._started_at = time.monotonic()

    def say(self, text: str) -> None:
        self._write(f"[{time.monotonic() - self._started_at:6.1f}s] {text}")

    @asynccontextmanager
    async def step(self, text: str) -> AsyncIterator[None]:
        begin = time.monotonic()
        self.say(f"{text} ...")
        ticking = asyncio.create_task(self._tick(text, begin))
        try:
            yield
        finally:
            ticking.cancel()
        self.say(f"{text}: done in {time.monotonic() - begin:.1f} s")

    async def _tick(self, text: str, begin: float) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.say(f"{text} ... {time.monotonic() - begin:.0f} s")
