"""Sampling parameters on their way to the worker, choices, and log probabilities on their way back.

The scripted worker says how likely each token was, by rules that a test can check.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from protos.infinite_llm.v1 import inference_pb2, worker_pb2
from services.common.errors import InstanceLost
from services.router.token_job import choice_seed
from tests.unit.router.cluster import LENGTH, MODEL, STOP, TOKENIZER, FakeWorker, fail, running, say
from tests.unit.router.test_chat_and_completions import CHAT, events
from tests.unit.router.test_grpc_door import generate

PROMPT = "hello w"
EURO = "€"  # three bytes, two tokens
ALL: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "min_tokens": 2,
}


def message(tokens: list[int], position: int, num_top: int) -> list[worker_pb2.TokenLogprobs]:
    return [
        worker_pb2.TokenLogprobs(
            chosen=-float(position + index),
            top_token_ids=list(range(10, 10 + num_top)),
            top=[-0.5] * num_top,
        )
        for index in range(len(tokens))
    ]


def likely(text: str, cached: int = 0) -> Any:
    """Token i has log probability -i; the alternatives are tokens 10, 11, ... at -0.5."""

    async def script(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        token_ids = TOKENIZER.encode(text).ids[: request.max_tokens]
        for index, token_id in enumerate(token_ids):
            response = worker_pb2.GenerateTokensResponse(token_ids=[token_id])
            if request.sampling.HasField("logprobs"):
                num_top = request.sampling.logprobs
                response.logprobs.extend(message([token_id], index, num_top))
            if index == 0:
                response.cached_tokens = cached
                if request.sampling.HasField("prompt_logprobs"):
                    tokens = list(request.prompt_token_ids[1:])
                    num_top = request.sampling.prompt_logprobs
                    response.prompt_logprobs.extend(message(tokens, 100, num_top))
            yield response
        yield worker_pb2.GenerateTokensResponse(finish_reason=STOP)

    return script


async def complete(worker: FakeWorker, **body: Any) -> Any:
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT} | body)
    assert answer.status_code == 200, answer.text
    return answer


async def test_every_parameter_reaches_the_worker() -> None:
    worker = FakeWorker(1, say("ok"))
    extra = {
        "logit_bias": {"5": -100, "6": 1.5},
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "priority": -2,
        "cache_salt": "mine",
        "seed": -1,
        "logprobs": 0,
    }
    await complete(worker, **ALL, **extra)
    request = worker.requests[0]
    assert {name: getattr(request.sampling, name) for name in ALL} == ALL
    assert dict(request.sampling.logit_bias) == {5: -100.0, 6: 1.5}
    assert list(request.stop_token_ids) == [3, 4]
    assert (request.ignore_eos, request.priority, request.cache_salt) == (True, -2, "mine")
    assert request.sampling.seed == 2**64 - 1
    assert request.sampling.HasField("logprobs")
    assert not request.sampling.HasField("prompt_logprobs")


async def test_every_parameter_reaches_the_worker_over_grpc() -> None:
    worker = FakeWorker(1, likely("ok", cached=1))
    options: dict[str, Any] = ALL | {"logit_bias": {5: 2.0}, "stop_token_ids": [3]}
    async with running([worker]) as cluster:
        responses: list[inference_pb2.GenerateResponse] = await generate(
            cluster, prompt="x", **options, ignore_eos=True, priority=4, cache_salt="s"
        )
    request = worker.requests[0]
    for name, value in ALL.items():
        assert getattr(request.sampling, name) == pytest.approx(value)
    assert dict(request.sampling.logit_bias) == {5: 2.0}
    assert list(request.stop_token_ids) == [3]
    assert (request.ignore_eos, request.priority, request.cache_salt) == (True, 4, "s")
    assert responses[-1].usage.cached_tokens == 1


async def test_choices_have_seeds_of_their_own_and_their_place() -> None:
    async def script(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        prompt = TOKENIZER.decode(list(request.prompt_token_ids))
        text = f"{prompt}{request.sampling.seed % 1000}"
        yield worker_pb2.GenerateTokensResponse(
            token_ids=TOKENIZER.encode(text).ids, cached_tokens=1
        )
        yield worker_pb2.GenerateTokensResponse(finish_reason=STOP)

    worker = FakeWorker(1, script)
    body = (await complete(worker, prompt=["a", "b"], n=3, seed=12)).json()
    seeds = [choice_seed(12, number) for number in range(3)]
    assert seeds[0] == 12
    assert len(set(seeds)) == 3
    wanted = [f"{prompt}{seed % 1000}" for prompt in "ab" for seed in seeds]
    assert [choice["text"] for choice in body["choices"]] == wanted
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_choices_wait_for_the_prompt_and_follow_it() -> None:
    """Both others go where the first one went, although that instance is the busier one."""
    may_begin = asyncio.Event()

    async def slow(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        await may_begin.wait()
        async for response in say("x")(request):
            yield response

    workers = [FakeWorker(1, slow), FakeWorker(2, slow)]
    async with running(workers) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        body = {"model": MODEL, "prompt": PROMPT, "n": 3}
        answer = asyncio.create_task(http.post("/v1/completions", json=body))
        while not any(worker.requests for worker in workers):
            await asyncio.sleep(0.005)
        assert sum(len(worker.requests) for worker in workers) == 1
        may_begin.set()
        assert len((await answer).json()["choices"]) == 3
    assert sorted(len(worker.requests) for worker in workers) == [0, 3]


async def test_a_prompt_that_fails_fails_all_its_choices() -> None:
    worker = FakeWorker(1, fail(InstanceLost("gone"), after="some"))
    async with (
        running([worker], resume_timeout_s=0.2) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        body = {"model": MODEL, "prompt": PROMPT, "n": 3}
        answer = await http.post("/v1/completions", json=body)
    assert answer.json()["error"]["code"] == "instance_lost"


async def test_log_probabilities_of_a_completion() -> None:
    worker = FakeWorker(1, likely(f"hello {EURO}"))
    choice = (await complete(worker, logprobs=2)).json()["choices"][0]
    token_ids = TOKENIZER.encode(f"hello {EURO}").ids
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "hello"
    assert logprobs["token_logprobs"] == [-float(index) for index in range(len(token_ids))]
    assert logprobs["text_offset"][:2] == [0, 5]
    first, second = (TOKENIZER.decode([token_id]) for token_id in (10, 11))
    assert logprobs["top_logprobs"][0] == {"hello": 0.0, first: -0.5, second: -0.5}


async def test_log_probabilities_of_a_chat_have_the_bytes_of_half_characters() -> None:
    worker = FakeWorker(1, likely(EURO))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        body = CHAT | {"logprobs": True, "top_logprobs": 1}
        answer = await http.post("/v1/chat/completions", json=body)
        streamed = await http.post("/v1/chat/completions", json=body | {"stream": True})
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]) == EURO.encode()
    assert len(content) > 1
    assert content[1]["logprob"] == -1.0
    assert content[0]["top_logprobs"][0]["logprob"] == -0.5
    deltas = [event["choices"][0] for event in events(streamed.text)]
    tokens = [token for delta in deltas for token in (delta["logprobs"] or {}).get("content", [])]
    assert tokens == content
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == EURO


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_echo_begins_with_the_prompt(is_streamed: bool) -> None:
    worker = FakeWorker(1, likely("x"))
    answer = await complete(worker, echo=True, logprobs=1, stream=is_streamed)
    if is_streamed:
        choices = [event["choices"][0] for event in events(answer.text)]
    else:
        choices = answer.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == PROMPT + "x"
    num_prompt = len(TOKENIZER.encode(PROMPT).ids)
    logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert logprobs == [None, *(-100.0 - index for index in range(num_prompt - 1)), 0.0]
    offsets = [value for choice in choices for value in choice["logprobs"]["text_offset"]]
    assert offsets[-1] == len(PROMPT)


async def test_echo_alone_scores_a_prompt() -> None:
    worker = FakeWorker(1, likely("x"))
    prompt = TOKENIZER.encode(PROMPT).ids
    body = (await complete(worker, prompt=prompt, echo=True, logprobs=0, max_tokens=0)).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(prompt)
    assert body["usage"]["completion_tokens"] == 0


async def test_prompt_log_probabilities_by_token_id() -> None:
    worker = FakeWorker(1, likely("x"))
    body = (await complete(worker, prompt_logprobs=1, n=2)).json()
    token_ids = TOKENIZER.encode(PROMPT).ids
    for choice in body["choices"]:
        first, second, *_ = choice["prompt_logprobs"]
        assert first is None
        assert second[str(token_ids[1])]["logprob"] == -100.0
        assert second["10"]["logprob"] == -0.5
        assert choice["logprobs"] is None
    asked = [request.sampling.HasField("prompt_logprobs") for request in worker.requests]
    assert asked == [True, False]


async def test_what_is_not_a_number_does_not_break_the_answer() -> None:
    async def script(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        for value in (math.nan, -math.inf):
            logprobs = [worker_pb2.TokenLogprobs(chosen=value)]
            yield worker_pb2.GenerateTokensResponse(token_ids=[5], logprobs=logprobs)
        yield worker_pb2.GenerateTokensResponse(finish_reason=LENGTH)

    body = (await complete(FakeWorker(1, script), logprobs=0)).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


async def test_stop_strings_wait_for_the_minimum_length() -> None:
    worker = FakeWorker(1, say("a.b.c.d"))
    body = (await complete(worker, stop=".", min_tokens=3)).json()
    assert body["choices"][0]["text"] == "a.b"


async def test_the_openai_client_reads_choices_and_log_probabilities() -> None:
    async with (
        running([FakeWorker(1, likely("hello", cached=3))]) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            logprobs=True,
            top_logprobs=2,
            logit_bias={"5": 1},
        )
        completion = await client.completions.create(
            model=MODEL, prompt="hi", logprobs=2, echo=True, best_of=1
        )
    assert [choice.index for choice in chat.choices] == [0, 1]
    logprobs = chat.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert logprobs.content[0].token == "hello"
    assert len(logprobs.content[0].top_logprobs) == 2
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 3
    legacy = completion.choices[0].logprobs
    assert legacy is not None and legacy.tokens is not None
    assert "".join(legacy.tokens) == "hihello"
