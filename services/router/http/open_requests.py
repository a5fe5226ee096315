"""The bound on HTTP requests at once: each may bring a large body. A layer of the app."""

from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import Overloaded
from services.router.access.http_guard import PROBES
from services.router.http.errors import error_response


class OpenRequests:
    """Owner of their count. Probes are always answered."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        if self._num_requests >= self._max_requests:
            error = Overloaded(f"more than {self._max_requests} HTTP requests at once")
            await error_response(error)(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1
