"""Lets sequences into the cluster when it has room for them. Part of dispatch.

What was refused here has cost no instance anything, and what waits here takes nobody's memory.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import Overloaded
from services.router.capacity import Room
from services.router.patience import Patience
from services.router.token_job import TokenJob
from services.router.waiting_line import Place, WaitingLine


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_length: int
    timeout_s: float
    patience_s: float


class Turns:
    """Owner of the waiting line."""

    def __init__(
        self, limits: QueueLimits, room: Callable[[], Room | None], patience: Patience
    ) -> None:
        """`room`: what there is now; None while there is nobody who could say."""
        self._limits = limits
        self._room = room
        self._patience = patience
        self._line = WaitingLine(limits.max_length, limits.patience_s)
        self._called: dict[Place, asyncio.Event] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    async def wait(self, job: TokenJob) -> None:
        """Until there is room for the job; Overloaded if there is none in time."""
        place = self._line.join(job.priority, job.num_start_tokens, time.monotonic())
        self._called[place] = asyncio.Event()
        try:
            self.call_next()
            timeout_s = self._limits.timeout_s
            late = Overloaded("no memory became free in time", retry_after_s=max(1.0, timeout_s))
            async with self._patience.limit(timeout_s, late):
                await self._called[place].wait()
        finally:
            self._line.leave(place)
            del self._called[place]

    def call_next(self) -> None:
        """After anything that may have made room."""
        if not len(self._line):
            return
        room = self._room()
        places = [*self._called] if room is None else self._line.admit(room, time.monotonic())
        for place in places:
            # Without instances, dispatch says so.
            self._line.leave(place)
            self._called[place].set()
