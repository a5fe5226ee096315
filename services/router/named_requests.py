"""Requests that their clients have given names, to abort them by. Used by the gRPC front door."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from services.common.errors import Aborted, InvalidRequest
from services.router.access.account import Account, account_context

MAX_NAME_CHARS = 128

T = TypeVar("T")


class NamedRequests:
    """Owner of the tasks. Names are each client's own."""

    def __init__(self) -> None:
        self._running: dict[tuple[Account | None, str], asyncio.Task[Any]] = {}

    async def run(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, which has no name where it is empty; raises Aborted."""
        if not name:
            return await work
        key = account_context.get(), name
        if len(name) > MAX_NAME_CHARS or key in self._running:
            work.close()
            wanted = f"a name of at most {MAX_NAME_CHARS} characters that is not in use"
            raise InvalidRequest(f"request_id must be {wanted}", param="request_id")
        task = asyncio.create_task(work)
        self._running[key] = task
        try:
            return await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None and this.cancelling():
                raise  # the client has left
            raise Aborted("aborted by the client") from None
        finally:
            del self._running[key]

    async def abort(self, name: str) -> bool:
        """Returns when the request has ended: whether there was one."""
        task = self._running.get((account_context.get(), name))
        if task is None:
            return False
        task.cancel()
        await asyncio.wait([task])
        return True
