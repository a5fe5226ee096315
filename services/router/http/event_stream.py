"""Server-sent events whose status line waits for the first event. Used by the OpenAI routes.

An error before the first event is an ordinary error answer; after it, it is an event that ends the
stream.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
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


class EventSink:
    """Writes events; the first one starts the answer."""

    def __init__(self, send: Send, write_timeout_s: float) -> None:
        self._send = send
        self._write_timeout_s = write_timeout_s
        self.started = False

    async def event(self, body: dict[str, Any]) -> None:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        await self._write(text, more=True)

    async def done(self) -> None:
        await self._write("[DONE]", more=False)

    async def error(self, error: InfiniteLLMError) -> None:
        """Ends the stream; without `[DONE]`, which would say that all is well."""
        await self._write(json.dumps(error_body(error), ensure_ascii=False), more=False)

    async def _write(self, data: str, more: bool) -> None:
        chunk = f"data: {data}\n\n".encode()
        try:
            # A client that is connected but does not read would hold its KV memory for ever.
            async with asyncio.timeout(self._write_timeout_s):
                if not self.started:
                    self.started = True
                    start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                    await self._send(start)
                await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
        except (OSError, TimeoutError):
            raise ClientDisconnected from None


class EventStream(Response):
    def __init__(
        self, produce: Callable[[EventSink], Awaitable[None]], write_timeout_s: float
    ) -> None:
        # Headers are sent by the sink, so nothing of Response's own set-up is of use.
        self._produce = produce
        self._write_timeout_s = write_timeout_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = EventSink(send, self._write_timeout_s)
        try:
            await run_until_disconnect(receive, self._run(sink))
        except ClientDisconnected:
            if not sink.started:
                raise

    async def _run(self, sink: EventSink) -> None:
        try:
            await self._produce(sink)
        except InfiniteLLMError as error:
            if not sink.started:
                raise
            await sink.error(error)
