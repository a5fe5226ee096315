"""/healthz and /readyz, for the kubelet. Built by `__main__`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from services.common.errors import ConfigError


@asynccontextmanager
async def health_server(
    host: str, port: int, is_alive: Callable[[], bool], is_ready: Callable[[], bool]
) -> AsyncIterator[None]:
    """Port 0 serves nothing."""
    if not port:
        yield
        return
    app = web.Application()
    app.router.add_get("/healthz", _answer(is_alive))
    app.router.add_get("/readyz", _answer(is_ready))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"INFINITE_LLM_HEALTH_PORT={port}: {error.strerror}") from error
    try:
        yield
    finally:
        await runner.cleanup()


def _answer(is_well: Callable[[], bool]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="ok") if is_well() else web.Response(status=503, text="not now")

    return answer
