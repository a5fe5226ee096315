"""Workers that die, hang or refuse, clients that leave: nothing outlives its deadline."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.common.errors import (
    ContextLengthExceeded,
    InstanceLost,
    InternalError,
    Overloaded,
    Unavailable,
)
from services.router.http.routes import OpenAiRoutes
from tests.unit.router.cluster import MODEL, Cluster, FakeWorker, Script, fail, hang, running, say

COMPLETION = {"model": MODEL, "prompt": "hello"}


def pair(first: Script, second: Script) -> list[FakeWorker]:
    """Two workers of which the first is always preferred."""
    workers = [FakeWorker(1, first), FakeWorker(2, second)]
    workers[1].load.running = 9
    return workers


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(Unavailable("stopping"), id="unavailable"),
        pytest.param(InstanceLost("creditor died"), id="lost"),
        pytest.param(Overloaded("queue is full"), id="full"),
    ],
)
async def test_before_the_first_token_another_instance_takes_over(error: Exception) -> None:
    workers = pair(fail(error), say("fine"))
    async with running(workers) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/completions", json=COMPLETION)
    assert answer.json()["choices"][0]["text"] == "fine"
    ids = [worker.requests[0].req_id for worker in workers]
    assert ids[0] != ids[1]


async def test_a_dead_address_is_passed_over() -> None:
    workers = pair(say("unreachable"), say("fine"))
    async with (
        running(workers, resume_timeout_s=0.2) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        await cluster.stop_worker(workers[0])
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert answer.json()["choices"][0]["text"] == "fine"
        await cluster.stop_worker(workers[1])
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        pytest.param(Overloaded("full"), 429, "overloaded", id="all full"),
        pytest.param(InstanceLost("gone"), 502, "instance_lost", id="all lost"),
        pytest.param(InternalError("bug"), 500, "internal_error", id="bug"),
        pytest.param(
            ContextLengthExceeded("too long"), 400, "context_length_exceeded", id="too long"
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_are_ordinary_answers(
    error: Exception, status: int, code: str, stream: bool
) -> None:
    async with (
        running(pair(fail(error), fail(error)), resume_timeout_s=0.2) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post("/v1/completions", json=COMPLETION | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    "error", [Unavailable("stopping"), InstanceLost("creditor died"), Overloaded("odd")]
)
async def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error_event(
    error: Exception,
) -> None:
    workers = pair(fail(error, after="some"), fail(error))
    async with (
        running(workers, resume_timeout_s=0.2) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        streamed = await http.post("/v1/completions", json=COMPLETION | {"stream": True})
        whole = await http.post("/v1/completions", json=COMPLETION)
    *texts, last = [json.loads(e.removeprefix("data: ")) for e in streamed.text.split("\n\n") if e]
    assert "".join(event["choices"][0]["text"] for event in texts) == "some"
    assert last["error"]["code"] == "instance_lost"
    assert (whole.status_code, whole.json()["error"]["code"]) == (502, "instance_lost")


@pytest.mark.parametrize(
    ("script", "settings", "status", "code"),
    [
        pytest.param(
            hang(), {"first_token_timeout_s": 0.1}, 504, "deadline_exceeded", id="no token yet"
        ),
        pytest.param(
            hang("some"), {"stream_idle_timeout_s": 0.1}, 502, "instance_lost", id="after some"
        ),
    ],
)
async def test_a_hung_worker_ends_with_an_error(
    script: Script, settings: dict[str, Any], status: int, code: str
) -> None:
    worker = FakeWorker(1, script)
    async with (
        running([worker], resume_timeout_s=0.2, **settings) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        await asyncio.wait_for(worker.aborted.wait(), 5)


async def leave_after(cluster: Cluster, body: dict[str, Any], num_events: int) -> None:
    """A client that closes its connection after some events (zero: while it waits)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    for _ in range(num_events):
        while not (await reader.readline()).startswith(b"data: "):
            pass
    while not cluster.workers[0].requests:
        await asyncio.sleep(0.005)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("script", "stream", "num_events"),
    [
        pytest.param(hang(), False, 0, id="whole answer"),
        pytest.param(hang(), True, 0, id="before the first token"),
        pytest.param(hang("some"), True, 2, id="in the stream"),
    ],
)
async def test_a_client_that_leaves_aborts_the_request(
    script: Script, stream: bool, num_events: int
) -> None:
    worker = FakeWorker(1, script)
    async with running([worker]) as cluster:
        await leave_after(cluster, COMPLETION | {"stream": stream}, num_events)
        await asyncio.wait_for(worker.aborted.wait(), 5)


async def test_a_client_that_leaves_while_it_sends_is_no_error() -> None:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(5):
            while 'status="499"' not in (await http.get("/metrics")).text:
                await asyncio.sleep(0.01)


async def test_one_lost_sequence_ends_the_whole_request() -> None:
    async def script(request: Any) -> Any:
        failing = fail(InternalError("bug")) if request.prompt_token_ids[0] == 1 else hang("some")
        async for response in failing(request):
            yield response

    worker = FakeWorker(1, script)
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/completions", json=COMPLETION | {"prompt": [[1], [2]]})
        assert answer.status_code == 500
        await asyncio.wait_for(worker.aborted.wait(), 5)


async def test_a_stop_string_aborts_the_request_and_is_not_leaked() -> None:
    worker = FakeWorker(1, say("one END two" + "x" * 400))
    body = COMPLETION | {"stop": "END", "max_tokens": 400}
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/completions", json=body)
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert answer.json()["usage"]["completion_tokens"] == len("one END")


async def test_serving_goes_on_without_the_gmanager() -> None:
    worker = FakeWorker(1, say("fine"))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        await cluster.stop_gmanager()
        await asyncio.sleep(0.6)  # two polls
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert answer.json()["choices"][0]["text"] == "fine"
        assert (await http.get("/health")).status_code == 200


async def test_load_balancers_may_probe_with_head() -> None:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        for path in ("/health", "/live", "/metrics", "/v1/models"):
            answer = await http.head(path)
            assert (answer.status_code, answer.content) == (200, b"")


async def test_an_instance_that_left_gets_nothing_more() -> None:
    workers = pair(say("first"), say("second"))
    async with running(workers) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        await http.post("/v1/completions", json=COMPLETION)
        workers[0].load.draining = True
        await asyncio.sleep(0.6)  # two polls
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert answer.json()["choices"][0]["text"] == "second"


async def test_shutdown_lets_streams_finish_and_takes_no_more() -> None:
    release = asyncio.Event()

    async def script(request: Any) -> Any:
        async for response in say("some")(request):
            yield response
            await release.wait()

    async with (
        running([FakeWorker(1, script)], shutdown_timeout_s=10.0) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
        httpx.AsyncClient(base_url=cluster.url) as late,
    ):
        running_request = asyncio.create_task(http.post("/v1/completions", json=COMPLETION))
        while not cluster.workers[0].requests:
            await asyncio.sleep(0.005)
        cluster.stop.set()
        await asyncio.sleep(0.4)  # uvicorn looks every 0.1 s
        with pytest.raises(httpx.ConnectError):
            await late.get("/live")
        release.set()
        answer = await running_request
    assert answer.json()["choices"][0]["text"] == "some"


async def test_an_unexpected_error_is_a_clear_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(OpenAiRoutes, "_answer", broken)
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post("/v1/completions", json=COMPLETION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


async def test_shutdown_does_not_wait_for_ever() -> None:
    worker = FakeWorker(1, hang("some"))
    async with running([worker], shutdown_timeout_s=1.0) as cluster:
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
        raw = json.dumps(COMPLETION | {"stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write((head + raw).encode())
        await reader.readuntil(b"data: ")
        cluster.stop.set()
        await asyncio.wait_for(worker.aborted.wait(), 10)
        rest = await reader.read()
        writer.close()
    # Cut, but not without a word.
    assert b'"code":"unavailable"' in rest.replace(b" ", b"")


async def test_at_shutdown_a_whole_answer_ends_as_an_openai_error() -> None:
    async with (
        running([FakeWorker(1, hang("some"))], shutdown_timeout_s=1.0) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        asking = asyncio.create_task(http.post("/v1/completions", json=COMPLETION))
        while not cluster.workers[0].requests:
            await asyncio.sleep(0.005)
        cluster.stop.set()
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
