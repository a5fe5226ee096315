"""Bounds on waiting, all of which shrink when the router has to end. Owned by the dispatcher."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.errors import InfiniteLLMError, Unavailable


class Patience:
    def __init__(self) -> None:
        self._end_s = math.inf
        self._waiting: set[asyncio.Timeout] = set()

    @property
    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self._end_s

    def end_by(self, end_s: float) -> None:
        """Whatever still waits at that time of the loop's clock ends with Unavailable."""
        self._end_s = end_s
        for timeout in self._waiting:
            if not timeout.expired():  # though it may wait for its clean-up still
                timeout.reschedule(min(end_s, timeout.when() or end_s))

    @asynccontextmanager
    async def limit(self, limit_s: float, error: InfiniteLLMError) -> AsyncIterator[None]:
        """Raises `error` after `limit_s`."""
        now_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(min(now_s + limit_s, self._end_s)) as timeout:
                self._waiting.add(timeout)
                try:
                    yield
                finally:
                    self._waiting.discard(timeout)
        except TimeoutError:
            raise (Unavailable("the router is shutting down") if self.is_over else error) from None
