"""What an application developer does (the official client, gRPC), and what goes wrong for them."""

import asyncio

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.infinite_llm.v1 import inference_pb2, inference_pb2_grpc
from services.local.cluster import LocalCluster
from tests.integration.cluster import (
    ANSWER_DEADLINE_S,
    BLOCK_SIZE,
    NUM_BLOCKS,
    assert_no_leak,
    http_client,
)

pytestmark = [pytest.mark.integration, pytest.mark.model]

QUESTION = "What is the capital of France?"


@pytest.fixture
async def client(pair: LocalCluster) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    return openai.AsyncOpenAI(
        base_url=f"{pair.http_url}/v1", api_key="none", http_client=http, max_retries=0
    )


async def test_the_model_answers_a_question(pair: LocalCluster, client: openai.AsyncOpenAI) -> None:
    async with client:
        answer = await client.chat.completions.create(
            model=pair.spec.model_name,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=24,
        )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streams_say_what_whole_answers_say(
    pair: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    async with client:
        whole = await client.completions.create(
            model=pair.spec.model_name, prompt="Once upon a time", max_tokens=12, temperature=0
        )
        stream = await client.completions.create(
            model=pair.spec.model_name,
            prompt="Once upon a time",
            max_tokens=12,
            temperature=0,
            stream=True,
        )
        pieces = [chunk.choices[0].text async for chunk in stream if chunk.choices]
    assert len(pieces) > 2
    assert "".join(pieces) == whole.choices[0].text


async def test_models_and_health(pair: LocalCluster, client: openai.AsyncOpenAI) -> None:
    async with client, http_client(pair) as http:
        models = await client.models.list()
        assert [model.id for model in models.data] == [pair.spec.model_name]
        assert (await http.get("/health")).status_code == 200


async def test_grpc_speaks_text_with_health_and_reflection(pair: LocalCluster) -> None:
    async with grpc.aio.insecure_channel(pair.grpc_address) as channel:
        health: health_pb2_grpc.HealthStub = health_pb2_grpc.HealthStub(channel)
        status = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            prompt=QUESTION, chat=True, max_tokens=24, temperature=0
        )
        answers = [a async for a in stub.Generate(request, timeout=ANSWER_DEADLINE_S)]
    assert "Paris" in "".join(answer.text for answer in answers)
    assert answers[-1].finish_reason in ("stop", "length")
    assert answers[-1].usage.completion_tokens > 0


CAPACITY_OF_TWO = 2 * NUM_BLOCKS * BLOCK_SIZE


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"prompt": [5] * (CAPACITY_OF_TWO + 1)}, 400, "context_length_exceeded", "prompt"),
        ({"prompt": [10**6]}, 400, None, "prompt"),
        ({"prompt": "hi", "model": "nobody"}, 404, "model_not_found", "model"),
        ({"prompt": "hi", "temperature": -1}, 400, None, "temperature"),
        ({"prompt": "hi", "max_tokens": -5}, 400, None, "max_tokens"),
        ({"prompt": "hi", "best_of": 3}, 400, None, "best_of"),
        ({}, 400, None, "prompt"),
    ],
)
async def test_bad_input_is_refused_at_once_and_the_next_request_works(
    pair: LocalCluster, body: dict[str, object], status: int, code: str | None, param: str
) -> None:
    async with http_client(pair) as http:
        bad = await http.post(
            "/v1/completions", json={"model": pair.spec.model_name} | body, timeout=5
        )
        error = bad.json()["error"]
        assert bad.status_code == status, bad.text
        assert error["param"] == param, error
        assert code is None or error["code"] == code
        good = {"model": pair.spec.model_name, "prompt": "hi", "max_tokens": 2}
        assert (await http.post("/v1/completions", json=good)).status_code == 200


async def test_malformed_json_is_an_openai_error(pair: LocalCluster) -> None:
    async with http_client(pair) as http:
        bad = await http.post("/v1/chat/completions", content=b'{"model": ')
    assert bad.status_code == 400
    assert bad.json()["error"]["type"] == "invalid_request_error"


async def test_a_client_that_leaves_frees_every_block_everywhere(pair: LocalCluster) -> None:
    body = {
        "model": pair.spec.model_name,
        "prompt": [1000] * (NUM_BLOCKS * BLOCK_SIZE + 100),
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
    }
    async with http_client(pair) as http:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
        await asyncio.wait_for(assert_no_leak(pair), 10)
