"""Calls over HTTP: what is sent, and what becomes of answers that are none."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from services.operator import api as apis
from services.operator.api import Api, ApiError, kubeconfig_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, Any]] = []
        self.handler: Handler | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        content_type = request.headers.get("Content-Type", "")
        parsed = json.loads(body) if body else None
        self.requests.append((request.method, request.path_qs, content_type, parsed))
        assert request.headers["Authorization"] == "Bearer token"
        if self.handler is not None:
            return await self.handler(request)
        return web.json_response({"items": [{"a": 1}]})


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[Api]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    configuration = Configuration(
        host=f"http://127.0.0.1:{port}", api_key={"BearerToken": "Bearer token"}
    )
    api = Api(ApiClient(configuration))
    yield api
    await api.close()
    await runner.cleanup()


async def test_what_is_sent(api: Api, server: Server) -> None:
    assert await api.list("/pods", {"a": "b", "c": "d"}) == [{"a": 1}]
    await api.patch("/pod", {"x": None})
    await api.delete("/pod", "the-uid")
    await api.apply("/definition", {"y": 1}, "me")
    assert server.requests == [
        ("GET", "/pods?labelSelector=a%3Db,c%3Dd", "application/json", None),
        ("PATCH", "/pod", "application/merge-patch+json", {"x": None}),
        ("DELETE", "/pod", "application/json", {"preconditions": {"uid": "the-uid"}}),
        ("PATCH", "/definition?fieldManager=me&force=true", "application/apply-patch+yaml",
         {"y": 1}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (lambda: web.json_response({"message": "no such pod"}, status=404), 404, "no such pod"),
        (lambda: web.Response(text="<html>Bad gateway</html>", status=502), 502, "<html>Bad"),
        (lambda: web.Response(text="<html>hello</html>"), 0, "does not answer"),
    ],
)
async def test_a_refusal_says_why(
    api: Api, server: Server, answer: Callable[[], web.Response], status: int, message: str
) -> None:
    async def handle(_: web.Request) -> web.Response:
        return answer()

    server.handler = handle
    with pytest.raises(ApiError) as caught:
        await api.get("/pod")
    assert caught.value.status == status
    assert message in caught.value.message


async def test_a_server_that_is_silent_or_away_does_not_hold_us_up(
    api: Api, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apis, "CALL_DEADLINE_S", 0.1)
    waiting = asyncio.Event()

    async def handle(_: web.Request) -> web.Response:
        await waiting.wait()
        return web.Response()

    server.handler = handle
    with pytest.raises(ApiError) as caught:
        await api.get("/pod")
    assert caught.value.status == 0
    waiting.set()
    nowhere = Api(ApiClient(Configuration(host="http://127.0.0.1:1")))
    with pytest.raises(ApiError):
        await nowhere.get("/pod")
    await nowhere.close()


async def test_a_watch_tells_each_change_and_ends_with_an_error(api: Api, server: Server) -> None:
    events: list[dict[str, Any]] = [
        {"type": "ADDED", "object": {"n": 1}},
        {"type": "MODIFIED", "object": {"n": 2}},
        {"type": "ERROR", "object": {"code": 410, "message": "too old"}},
    ]

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(json.dumps(event).encode() + b"\n")
        return response

    server.handler = handle
    seen = []
    with pytest.raises(ApiError) as caught:
        async for changed in api.watch("/pods"):
            seen.append(changed)
    assert seen == [{"n": 1}, {"n": 2}]
    assert caught.value.status == 410
    assert "watch=true" in server.requests[0][1]
    assert "resourceVersion" not in server.requests[0][1]


def test_in_a_pod_the_accounts_token_is_used_unless_a_file_is_named() -> None:
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert kubeconfig_of(inside) is None
    assert kubeconfig_of(inside | {"KUBECONFIG": "f"}) == "f"
    assert kubeconfig_of({}) == "~/.kube/config"
