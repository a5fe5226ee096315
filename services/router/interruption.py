"""Tells of the interruptions of one stream: as metrics, log lines and spans. Used by dispatch."""

import logging
import time
from types import TracebackType
from typing import Self

from opentelemetry.trace import Span, Status, StatusCode

from services.common.errors import InfiniteLLMError
from services.common.ids import InstId
from services.common.telemetry import tracer
from services.router.metrics import RouterMetrics

_log = logging.getLogger(__name__)


class Interruptions:
    """An interruption lasts from a loss to the next message; around it the stream goes on."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._span: Span | None = None
        self._detail: dict[str, int | str] = {}
        self._since_s = 0.0

    def begin(self, inst_id: InstId, num_tokens: int, reason: str) -> None:
        """The stream lost its instance; while it looks for another, further ones may fail it."""
        if self._span is None:
            self._since_s = time.monotonic()
            self._detail = {"lost_inst_id": inst_id, "num_tokens": num_tokens, "reason": reason}
            self._span = tracer(__name__).start_span("resume stream", attributes=self._detail)

    def end(self, inst_id: InstId) -> None:
        """`inst_id` sent something: whatever was interrupted goes on there."""
        if self._span is None:
            return
        self._span.set_attribute("inst_id", inst_id)
        self._span.end()
        self._span = None
        self._metrics.streams_resumed.inc()
        interrupted_s = round(time.monotonic() - self._since_s, 3)
        _log.warning(
            "stream resumed",
            extra={**self._detail, "inst_id": inst_id, "interrupted_s": interrupted_s},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._span is None:
            return
        if isinstance(error, InfiniteLLMError):  # otherwise the client has left
            self._metrics.streams_failed.inc()
            self._span.set_status(Status(StatusCode.ERROR, error.message))
            _log.error("stream lost", extra=self._detail)
        self._span.end()
