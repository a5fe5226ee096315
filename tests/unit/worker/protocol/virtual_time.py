"""An event loop on which hours pass in milliseconds, with threads that never run side by side.

What runs in an executor is a thread that the loop waits for; `pause` gives the word back to the
loop for some virtual time. So the interleaving of steps, copies and messages is a matter of the
clock alone, and a run repeats itself exactly.
"""

import asyncio
import selectors
import threading
from collections.abc import Callable
from typing import Any

_strand = threading.local()


class _Ended(BaseException):
    """The world is over; whoever is paused unwinds."""


class _Strand:
    """One call in a thread of its own."""

    def __init__(self, loop: "VirtualLoop", function: Callable[[], Any]) -> None:
        self.done: asyncio.Future[Any] = loop.create_future()
        self._loop = loop
        self._function = function
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """On the loop's thread: until it pauses again, or is done."""
        self._go.release()
        self._back.acquire()

    def pause(self, delay_s: float) -> None:
        # The loop's thread waits for us, so that its loop is ours to touch.
        self._loop.call_later(delay_s, self.resume)
        self._wait()

    def beside(self, function: Callable[[], Any]) -> None:
        self._loop.run_in_executor(None, function)

    def end(self) -> None:
        self._is_ended = True
        self.resume()
        self._thread.join()

    def _wait(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._is_ended:
            raise _Ended

    def _run(self) -> None:
        _strand.current = self
        self._go.acquire()
        try:
            result, error = (None if self._is_ended else self._function()), None
        except BaseException as raised:
            result, error = None, raised
        self._loop.strands.discard(self)
        if not self.done.done() and not self._is_ended:
            self.done.set_exception(error) if error else self.done.set_result(result)
        self._back.release()


def pause(delay_s: float) -> None:
    """Called by what runs in an executor: let others run for so long."""
    _strand.current.pause(delay_s)


def beside(function: Callable[[], Any]) -> None:
    """Called by what runs in an executor: start this, too; nobody waits for it."""
    _strand.current.beside(function)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.strands: set[_Strand] = set()
        self._now_s = 0.0
        super().__init__(_Clockwork(self))

    def time(self) -> float:
        return self._now_s

    def advance(self, delay_s: float) -> None:
        self._now_s += delay_s

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Copies of one executor may overlap here: the order of one thread is not promised."""
        strand = _Strand(self, lambda: function(*args))
        self.strands.add(strand)
        self.call_soon(strand.resume)
        return strand.done

    def close(self) -> None:
        for strand in list(self.strands):
            strand.end()
        super().close()


class _Clockwork(selectors.SelectSelector):
    """Where the loop would wait, the clock goes on instead."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("everybody waits for ever")
            self._loop.advance(max(0.0, timeout))
        return ready
