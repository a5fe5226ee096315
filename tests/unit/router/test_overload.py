"""A full cluster: who waits, who is refused, and with which words."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from protos.infinite_llm.v1 import worker_pb2
from services.router.capacity import MAX_BACKLOG
from tests.unit.router.cluster import LENGTH, MODEL, FakeWorker, running

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 1}


class Gated:
    """Answers with one token once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def __call__(
        self, request: worker_pb2.GenerateTokensRequest
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        await self.gate.wait()
        yield worker_pb2.GenerateTokensResponse(token_ids=[5], finish_reason=LENGTH)


def full(script: Gated) -> FakeWorker:
    worker = FakeWorker(1, script)
    worker.load.free_blocks, worker.load.waiting_blocks = 1, 9
    worker.load.waiting = MAX_BACKLOG
    return worker


async def queued(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(10):
        while f"infinite_llm_router_queued {count}.0" not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.005)


async def test_a_request_waits_for_room_and_the_worker_does_not_hear_of_it_before() -> None:
    script = Gated()
    script.gate.set()
    worker = full(script)
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY, timeout=10))
        await queued(http, 1)
        assert worker.requests == []
        worker.load.waiting, worker.load.waiting_blocks = 0, 0
        assert (await asking).status_code == 200


async def test_nobody_waits_longer_than_the_queue_allows() -> None:
    settings = {"queue_timeout_s": 0.2}
    async with (
        running([full(Gated())], **settings) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post("/v1/completions", json=BODY, timeout=10)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "overloaded"


async def test_whoever_finds_the_queue_full_is_refused_at_once_and_nobody_else() -> None:
    script = Gated()
    worker = full(script)
    settings = {"max_queued_requests": 3, "queue_timeout_s": 60.0}
    async with (
        running([worker], **settings) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=10) as http,
    ):
        asking = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(8)]
        refused, waiting = await asyncio.wait(
            asking, timeout=5, return_when=asyncio.FIRST_COMPLETED
        )
        while len(refused) < 5:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
        assert {task.result().status_code for task in refused} == {429}
        assert all("retry-after" in task.result().headers for task in refused)
        script.gate.set()
        worker.load.waiting, worker.load.waiting_blocks, worker.load.free_blocks = 0, 0, 60
        answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in answers] == [200] * 3


async def test_a_request_that_can_never_fit_does_not_wait() -> None:
    body = BODY | {"max_tokens": 64 * 16}
    async with (
        running([full(Gated())], queue_timeout_s=60.0) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post("/v1/completions", json=body, timeout=10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_client_that_leaves_the_queue_makes_place() -> None:
    async with (
        running([full(Gated())], max_queued_requests=1) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=10) as http,
    ):
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await queued(http, 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await queued(http, 0)
