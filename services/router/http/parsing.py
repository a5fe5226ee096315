"""Bodies to requests, away from the event loop: most in a thread, large ones in another process.

Parsing JSON keeps every thread of its process waiting, the event loop's, too: a second for 20 MB.
Used by the OpenAI routes.
"""

import asyncio
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

from services.common.errors import InternalError, Overloaded
from services.router.http.body import parse_body
from services.router.http.request_body import RequestBody

#: Parsed in milliseconds; to send it to another process would take longer.
MAX_THREAD_BYTES = 256 * 1024
#: For the large bodies in front, too.
DEADLINE_S = 60.0

Body = TypeVar("Body", bound=RequestBody)


class BodyParser:
    """Owner of the process, which starts with the first large body."""

    def __init__(self, max_thread_bytes: int = MAX_THREAD_BYTES) -> None:
        self._max_thread_bytes = max_thread_bytes
        self._process: ProcessPoolExecutor | None = None

    async def parse(self, kind: type[Body], raw: bytes) -> tuple[Body, Any]:
        """The checked body, without its prompt, and the request that it makes."""
        if len(raw) <= self._max_thread_bytes:
            return await asyncio.to_thread(_parse, kind, raw)
        if self._process is None:
            # Not a fork: threads of this process may hold locks.
            self._process = ProcessPoolExecutor(1, get_context("spawn"), _begin)
        process, loop = self._process, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await loop.run_in_executor(process, _parse, kind, raw)
        except TimeoutError:
            raise Overloaded("too many large bodies are waiting to be read") from None
        except BrokenProcessPool:
            if self._process is process:
                self._process = None
            raise InternalError("the process that reads large bodies has ended") from None

    def close(self) -> None:
        if self._process is not None:
            self._process.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """In the new process, which ends with the router, however that ends."""
    # Signals of a terminal are for the router.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def _parse(kind: type[Body], raw: bytes) -> tuple[Body, Any]:
    body = parse_body(kind, raw)
    # The prompt is in the request: not to be sent twice.
    return body.without_prompt(), body.to_request()
