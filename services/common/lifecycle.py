"""The frame of every service's `__main__`: signals in, exit status out."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from services.common.errors import ConfigError, InfiniteLLMError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2

Result = TypeVar("Result")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger(__name__)


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    """Runs `main` until it returns; the event is set by SIGINT or SIGTERM, or by the service itself
    when something else asks it to stop.

    A second signal ends the process at once. Returns the exit status: 0 clean, 2 for a
    ConfigError, 1 for any other error of ours; those two print one line.
    """
    try:
        asyncio.run(_run_until_stopped(main))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return EXIT_CONFIG
    except InfiniteLLMError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK


async def until_stopped(work: Awaitable[Result], stop: asyncio.Event) -> Result | None:
    """Runs the work to its end; once `stop` is set it is cancelled, clean-up included: None."""
    running = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.wait([running])
    return None if running.cancelled() else running.result()


def in_daemon_thread(work: Callable[[], Result]) -> "asyncio.Future[Result]":
    """Runs blocking work that may be abandoned: the process can end before it does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, partial(future.set_exception, error))
        else:
            loop.call_soon_threadsafe(settle, partial(future.set_result, result))

    threading.Thread(target=run, name="background", daemon=True).start()
    return future


async def _run_until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop, signalled = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in _SIGNALS:
        loop.add_signal_handler(signum, _on_signal, stop, signalled, signum)
    try:
        await main(stop)
    finally:
        for signum in _SIGNALS:
            loop.remove_signal_handler(signum)


def _on_signal(stop: asyncio.Event, signalled: asyncio.Event, signum: int) -> None:
    if signalled.is_set():
        _log.warning("second signal, stopping at once")
        os._exit(128 + signum)
    signalled.set()
    stop.set()
