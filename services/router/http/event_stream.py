"""Server-sent events whose status line waits for the first event. Used by the OpenAI routes.

An error before the first event is an ordinary error answer; after it, it is an event that ends the
stream. A stream that is silent for long, as with a long prompt, carries comments, so that nothing
on the way takes it for dead.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import InfiniteLLMError
from services.router.http.disconnect import ClientDisconnected, run_until_disconnect
from services.router.http.errors import error_body

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would turn the stream into one late answer.
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class StreamPace:
    write_timeout_s: float
    """Longest time that a client may not read."""
    keep_alive_s: float
    """Longest silence; then comes a comment, which clients pass over."""


class EventSink:
    """Writes events; the first one, or the first comment, starts the answer."""

    def __init__(self, send: Send, pace: StreamPace) -> None:
        self._send = send
        self._pace = pace
        self._turn = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._last_s = self._clock()
        self._ended = False
        self.started = False

    async def keep_alive(self) -> None:
        """Runs beside whoever makes the events, until cancelled."""
        while True:
            silence_s = self._clock() - self._last_s
            if silence_s >= self._pace.keep_alive_s:
                await self._write(": keep-alive", more=True)
            else:
                await asyncio.sleep(self._pace.keep_alive_s - silence_s)

    async def event(self, body: dict[str, Any]) -> None:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        await self._write(f"data: {text}", more=True)

    async def done(self) -> None:
        await self._write("data: [DONE]", more=False)

    async def error(self, error: InfiniteLLMError) -> None:
        """Ends the stream; without `[DONE]`, which would say that all is well."""
        text = json.dumps(error_body(error), ensure_ascii=False)
        await self._write(f"data: {text}", more=False)

    async def _write(self, line: str, more: bool) -> None:
        try:
            # A client that is connected but does not read would hold its KV memory for ever.
            async with asyncio.timeout(self._pace.write_timeout_s), self._turn:
                if not self._ended:
                    await self._send_lines(f"{line}\n\n".encode(), more)
        except (OSError, TimeoutError):
            raise ClientDisconnected from None

    async def _send_lines(self, lines: bytes, more: bool) -> None:
        if not self.started:
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self.started = True
        await self._send({"type": "http.response.body", "body": lines, "more_body": more})
        self._ended = not more
        self._last_s = self._clock()


class EventStream(Response):
    def __init__(self, produce: Callable[[EventSink], Awaitable[None]], pace: StreamPace) -> None:
        # Headers are sent by the sink, so nothing of Response's own set-up is of use.
        self._produce = produce
        self._pace = pace
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = EventSink(send, self._pace)
        try:
            await run_until_disconnect(receive, self._run(sink))
        except ClientDisconnected:
            if not sink.started:
                raise

    async def _run(self, sink: EventSink) -> None:
        keeping_alive = asyncio.create_task(sink.keep_alive())
        try:
            await self._produce(sink)
        except InfiniteLLMError as error:
            if not sink.started:
                raise
            await sink.error(error)
        finally:
            keeping_alive.cancel()
            await asyncio.wait([keeping_alive])
