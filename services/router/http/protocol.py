"""uvicorn's HTTP/1.1 connection with the limits it lacks: size and time of a request's head.

Used by HttpServer. Bodies are limited where they are read.
"""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.common.errors import ClientError, InfiniteLLMError, InvalidRequest
from services.router.http.errors import error_body

#: Request line and headers together; what proxies forward is less.
MAX_HEAD_BYTES = 32 * 1024
#: From the first byte, or the connection's opening, to the end of the headers.
HEAD_DEADLINE_S = 10.0


class HeadTooLarge(ClientError):
    http_status = 431
    code = "headers_too_large"


_TOO_LARGE = HeadTooLarge(f"the headers are larger than {MAX_HEAD_BYTES} bytes")


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._num_parsed_bytes = 0
        self._num_unparsed_bytes = 0
        """Of a head that has not ended, with all that came of it in whole reads."""
        self._is_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_head or self.transport.is_closing():
            return
        # The parser keeps an unfinished header to itself, however long it is.
        self._num_unparsed_bytes += len(data)
        if self._num_unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_parsed(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_parsed(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """To whatever the parser did not take."""
        is_large = self._num_parsed_bytes > MAX_HEAD_BYTES
        self._refuse(_TOO_LARGE if is_large else InvalidRequest("this is not an HTTP request"))

    def _start_head(self) -> None:
        self._num_parsed_bytes = self._num_unparsed_bytes = 0
        self._is_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_DEADLINE_S, self.transport.close)

    def _end_head(self) -> None:
        self._is_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _count_parsed(self, num_bytes: int) -> None:
        self._num_parsed_bytes += num_bytes
        if self._num_parsed_bytes > MAX_HEAD_BYTES:
            # The parser ends, and uvicorn asks for the answer to bad input.
            raise ValueError

    def _refuse(self, error: InfiniteLLMError) -> None:
        body = json.dumps(error_body(error)).encode()
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[error.http_status] + head + body)
        self.transport.close()
