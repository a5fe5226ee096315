"""Asks for a key on every HTTP route but the probes. A layer of the app."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import InfiniteLLMError
from services.router.access.account import Account
from services.router.access.key_file import KeyFile
from services.router.http.errors import error_response

#: What a kubelet or a load balancer asks, which has no key.
PROBES = frozenset({"/health", "/live", "/ready"})


class HttpGuard:
    def __init__(self, app: ASGIApp, keys: KeyFile) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        account = None
        try:
            account = self._keys.account_of(_authorization(scope))
            # For the log line.
            scope["client_name"] = account.name
            with account.enter():
                await self._app(scope, receive, _with_headers(send, account))
        except InfiniteLLMError as error:
            # Only of the lines above: the app answers its own errors itself.
            response = error_response(error)
            response.headers.update({} if account is None else account.headers())
            await response(scope, receive, send)


def _authorization(scope: Scope) -> str | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    return values[0].decode("latin-1") if len(values) == 1 else None


def _with_headers(send: Send, account: Account) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            ours = [(name.encode(), value.encode()) for name, value in account.headers().items()]
            message["headers"] = [*message["headers"], *ours]
        await send(message)

    return watched
