"""uvicorn as a part of the process instead of its owner. Run by `__main__`."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from services.common.errors import ConfigError
from services.router.http.protocol import LimitedProtocol
from services.router.tls import ServerTls

_BACKLOG = 2048


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process's lifecycle."""
        yield


class HttpServer:
    """Listens from construction on, so that a port in use shows before anything is started."""

    def __init__(
        self, app: ASGIApp, host: str, port: int, shutdown_timeout_s: float, tls: ServerTls | None
    ) -> None:
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            # A pipelined request must not find what the one before it has left.
            reset_contextvars=True,
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, int(shutdown_timeout_s)),
            ssl_context_factory=None if tls is None else lambda config, default: tls.context,
        )
        self._server = _Server(config)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set and running streams have ended or run out of time."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            await stop.wait()
        finally:
            self._server.should_exit = True
            await serving


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol spelled out, or asyncio leaves Nagle's delay on.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"INFINITE_LLM_HTTP_PORT: {host}:{port}: {error.strerror}") from error
    return listener
