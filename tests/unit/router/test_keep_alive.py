"""A stream that has nothing to say says so, and is otherwise as it would have been."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import openai

from protos.infinite_llm.v1 import worker_pb2
from services.common.errors import InvalidRequest
from tests.unit.router.cluster import MODEL, FakeWorker, Script, fail, running, say

COMPLETION = {"model": MODEL, "prompt": "hello", "stream": True}
DEADLINE_S = 10.0
COMMENT = ": keep-alive"


def after(event: asyncio.Event, script: Script) -> Script:
    """As a long prompt: nothing for a while, then the script."""

    async def slow(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        await event.wait()
        async for response in script(request):
            yield response

    return slow


async def lines_of(script: Script) -> list[str]:
    """What comes of a stream whose worker begins after the second comment."""
    begin = asyncio.Event()
    lines = []
    async with (
        running([FakeWorker(1, after(begin, script))], keep_alive_s=0.02) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
        http.stream("POST", "/v1/completions", json=COMPLETION) as answer,
        asyncio.timeout(DEADLINE_S),
    ):
        assert answer.status_code == 200
        assert answer.headers["x-accel-buffering"] == "no"
        async for line in answer.aiter_lines():
            lines.append(line)
            if lines.count(COMMENT) == 2:
                begin.set()
    return lines


async def test_comments_while_the_prompt_is_computed() -> None:
    lines = await lines_of(say("ok"))
    assert lines[:3] == [COMMENT, "", COMMENT]
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_an_error_after_a_comment_is_an_event() -> None:
    lines = await lines_of(fail(InvalidRequest("no", param="prompt")))
    assert lines[:3] == [COMMENT, "", COMMENT]
    assert '"param": "prompt"' in lines[-2]
    assert "data: [DONE]" not in lines


async def test_without_silence_there_are_none() -> None:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post("/v1/completions", json=COMPLETION)
    assert COMMENT not in answer.text


async def test_the_official_client_passes_over_them() -> None:
    begin = asyncio.Event()
    worker = FakeWorker(1, after(begin, say("ok")))
    async with (
        running([worker], keep_alive_s=0.01) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
        asyncio.timeout(DEADLINE_S),
    ):
        stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
        begin.set()
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "ok"


async def test_who_leaves_meanwhile_is_noticed_within_a_second() -> None:
    worker = FakeWorker(1, after(asyncio.Event(), say("ok")))
    async with running([worker], keep_alive_s=0.01) as cluster:
        async with (
            httpx.AsyncClient(base_url=cluster.url) as http,
            http.stream("POST", "/v1/completions", json=COMPLETION) as answer,
        ):
            assert answer.status_code == 200
        async with asyncio.timeout(1):
            await worker.aborted.wait()
