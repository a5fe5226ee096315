"""The last minute of an instance: nothing new, what was lent goes back, what runs may end.

Begun by a signal (`__main__`) or by the Drain call (`server`). The process ends after it, unless
the caller wants to end it himself: such a drain can be called back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from services.common.errors import Unavailable
from services.worker.rmanager.rmanager import RManager
from services.worker.streams import Streams

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class Remaining(NamedTuple):
    """Who still needs this instance; both zero: nobody."""

    num_requests: int
    num_lent_blocks: int


class Drain:
    """Begins once, or again after `cancel`; every further deadline may only be an earlier one."""

    def __init__(
        self,
        rmanager: RManager,
        streams: Streams,
        stop: asyncio.Event,
        timeout_s: float,
        be_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`stop` is set when a drain begins that makes the process end after it; `be_ready` tells
        those who ask for our health."""
        self._rmanager = rmanager
        self._streams = streams
        self._stop = stop
        self._timeout_s = timeout_s
        self._be_ready = be_ready
        self._deadline_s = float("inf")
        self._recalling: asyncio.Task[None] | None = None

    @property
    def remaining(self) -> Remaining:
        return Remaining(self._streams.num_open, self._rmanager.creditor.num_lent_blocks)

    async def begin(self, timeout_s: float | None = None) -> None:
        """The process ends after it. `timeout_s`: in place of the configured one."""
        self._stop.set()
        await self._begin(timeout_s)

    async def hold(self, timeout_s: float | None = None) -> None:
        """The same, but the process stays until it is told to end, or `cancel`."""
        await self._begin(timeout_s)
        if self._recalling is None and not self._stop.is_set():
            self._recalling = asyncio.create_task(self._recall())

    async def cancel(self) -> None:
        """After `hold`: as if there had been no drain."""
        if self._stop.is_set():
            raise Unavailable("the instance is going to end")
        if self._rmanager.is_draining:
            logger.info("the drain is called back")
            self._end_recalling()
            self._deadline_s = float("inf")
            self._rmanager.end_drain()
            await self._be_ready(True)

    async def finish(self) -> None:
        """Until nobody needs this instance any more, or the deadline."""
        self._end_recalling()
        while self._rmanager.creditor.recall_all() or self._streams.num_open:
            if asyncio.get_running_loop().time() >= self._deadline_s:
                return
            await asyncio.sleep(_POLL_S)

    async def _begin(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            timeout_s = float("inf") if self._rmanager.is_draining else self._timeout_s
        now_s = asyncio.get_running_loop().time()
        self._deadline_s = min(self._deadline_s, now_s + timeout_s)
        if not self._rmanager.is_draining:
            logger.info("draining", extra={"timeout_s": timeout_s})
            self._rmanager.begin_drain()
            await self._be_ready(False)

    async def _recall(self) -> None:
        while True:
            self._rmanager.creditor.recall_all()
            await asyncio.sleep(_POLL_S)

    def _end_recalling(self) -> None:
        if self._recalling is not None:
            self._recalling.cancel()
            self._recalling = None
