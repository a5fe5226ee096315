"""The official client, sync and async, streaming and not, without any special setting."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from services.common.errors import InstanceLost
from tests.unit.router.cluster import MODEL, TOKENIZER, Cluster, FakeWorker, fail, running, say

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]}
]
ANSWER = "hello wörld 😀"
NUM_TOKENS = len(TOKENIZER.encode(ANSWER).ids)


@contextmanager
def sync_client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def async_client(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


async def test_async() -> None:
    async with running([FakeWorker(1, say(ANSWER))]) as cluster, async_client(cluster) as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=100, user="me"
        )
        assert chat.choices[0].message.content == ANSWER
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None and chat.usage.completion_tokens == NUM_TOKENS
        completion = await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=100)
        assert [choice.text for choice in completion.choices] == [ANSWER, ANSWER]
        assert [choice.index for choice in completion.choices] == [0, 1]


async def test_async_streams() -> None:
    async with running([FakeWorker(1, say(ANSWER))]) as cluster, async_client(cluster) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == ANSWER
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == NUM_TOKENS
        texts = {0: "", 1: ""}
        async for part in await client.completions.create(
            model=MODEL, prompt=[[1, 2], [3]], max_tokens=100, stream=True
        ):
            texts[part.choices[0].index] += part.choices[0].text
        assert texts == {0: ANSWER, 1: ANSWER}


async def test_sync() -> None:
    def use(cluster: Cluster) -> None:
        with sync_client(cluster) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).owned_by == "infinite-llm"
            completion = client.completions.create(
                model=MODEL, prompt="a", max_tokens=100, stop=["w"], extra_body={"top_k": 5}
            )
            assert completion.choices[0].text == "hello "
            with client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True
            ) as chunks:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == ANSWER

    async with running([FakeWorker(1, say(ANSWER))]) as cluster:
        await asyncio.to_thread(use, cluster)
    assert cluster.workers[0].requests[0].sampling.top_k == 5


async def test_errors_have_the_clients_own_types() -> None:
    worker = FakeWorker(1, fail(InstanceLost("gone"), after="some"))
    async with (
        running([worker], resume_timeout_s=0.2) as cluster,
        async_client(cluster) as client,
    ):
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=200)
        assert refused.value.param == "n"
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=MODEL, prompt="a")
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        with pytest.raises(openai.APIError) as lost:
            async for _ in stream:
                pass
        assert lost.value.code == "instance_lost"
