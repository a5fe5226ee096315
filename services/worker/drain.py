"""The last minute of an instance: nothing new, what was lent goes back, what runs may end.

Begun by a signal (`__main__`) or by the Drain call (`server`); the process ends after it.
"""

import asyncio
import logging

from services.worker.rmanager.rmanager import RManager
from services.worker.streams import Streams

logger = logging.getLogger(__name__)

_POLL_S = 0.05


class Drain:
    """Begins once; every further deadline may only be an earlier one."""

    def __init__(
        self, rmanager: RManager, streams: Streams, stop: asyncio.Event, timeout_s: float
    ) -> None:
        """`stop` is set when the drain begins, and makes the process end after it."""
        self._rmanager = rmanager
        self._streams = streams
        self._stop = stop
        self._timeout_s = timeout_s
        self._deadline_s = float("inf")

    def begin(self, timeout_s: float | None = None) -> None:
        """On the event loop's thread. `timeout_s`: in place of the configured one."""
        if timeout_s is None:
            timeout_s = float("inf") if self._rmanager.is_draining else self._timeout_s
        now_s = asyncio.get_running_loop().time()
        self._deadline_s = min(self._deadline_s, now_s + timeout_s)
        if not self._rmanager.is_draining:
            logger.info("draining", extra={"timeout_s": timeout_s})
            self._rmanager.begin_drain()
            self._stop.set()

    async def finish(self) -> None:
        """Until nobody needs this instance any more, or the deadline."""
        while self._rmanager.creditor.recall_all() or self._streams.num_open:
            if asyncio.get_running_loop().time() >= self._deadline_s:
                return
            await asyncio.sleep(_POLL_S)
