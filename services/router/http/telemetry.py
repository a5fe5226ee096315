"""One span, one log line and the metrics of every HTTP request. Outermost layer of the app."""

import logging
import time

from opentelemetry.trace import Span
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.ids import new_req_id
from services.common.telemetry import req_id_context
from services.common.trace_context import span_of_call
from services.router.access.http_guard import PROBES
from services.router.metrics import RouterMetrics

#: What probes and scrapers call all the time.
_QUIET = PROBES | {"/metrics"}
_log = logging.getLogger(__name__)


class RequestTelemetry:
    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        req_id_context.set(new_req_id())
        in_flight = self._metrics.in_flight.track_inprogress()
        with span_of_call(scope["method"], headers) as span, in_flight:
            await self._measured(scope, receive, send, span)

    async def _measured(self, scope: Scope, receive: Receive, send: Send, span: Span) -> None:
        start_s = time.monotonic()
        # Where nothing is answered at all, the app has failed.
        status = 500

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                req_id = f"{req_id_context.get():x}".encode()
                message["headers"] = [*message["headers"], (b"x-request-id", req_id)]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            # The pattern, not the path: a client must not be able to mint label values.
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(route, str(status)).inc()
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.response.status_code", status)
            detail: dict[str, object] = {
                "route": route,
                "status": status,
                "duration_s": round(time.monotonic() - start_s, 3),
            }
            if "client_name" in scope:
                detail["client"] = scope["client_name"]
            _log.info("request", extra=detail)
