"""The public gRPC stream: same checks, same errors, found by health and reflection."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.infinite_llm.v1 import inference_pb2, inference_pb2_grpc
from services.common.errors import (
    ContextLengthExceeded,
    InfiniteLLMError,
    InstanceLost,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
)
from services.common.rpc import error_from_rpc, open_channel
from services.router.grpc_server import SERVICE_NAME
from tests.unit.router.cluster import TOKENIZER, Cluster, FakeWorker, fail, hang, running, say

DEADLINE_S = 10.0


async def generate(cluster: Cluster, **fields: Any) -> list[inference_pb2.GenerateResponse]:
    channel = open_channel(cluster.grpc_address)
    try:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(**fields)
        return [response async for response in stub.Generate(request, timeout=DEADLINE_S)]
    finally:
        await channel.close()


async def test_text_in_text_out() -> None:
    worker = FakeWorker(1, say("hello €", size=2))
    async with running([worker]) as cluster:
        responses = await generate(cluster, prompt="hello", temperature=0, seed=2**64 - 1)
    assert "".join(response.text for response in responses) == "hello €"
    assert [r.finish_reason for r in responses] == [""] * (len(responses) - 1) + ["stop"]
    usage = responses[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        1,
        len(TOKENIZER.encode("hello €").ids),
    )
    request = worker.requests[0]
    assert (request.sampling.temperature, request.sampling.top_p) == (0.0, 1.0)
    assert request.sampling.seed == 2**64 - 1
    assert request.max_tokens == 511


async def test_chat_applies_the_template_and_stop_strings_work() -> None:
    worker = FakeWorker(1, say("one END two"))
    async with running([worker]) as cluster:
        responses = await generate(cluster, prompt="hello", chat=True, stop=["END"], max_tokens=50)
    assert "".join(response.text for response in responses) == "one "
    prompt = TOKENIZER.decode(list(worker.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        pytest.param({"prompt": "x", "model": "other"}, ModelNotFound, "model", id="model"),
        pytest.param({"prompt": ""}, InvalidRequest, "prompt", id="empty"),
        pytest.param({"prompt": "x", "top_p": 2.0}, InvalidRequest, "top_p", id="top_p"),
        pytest.param(
            {"prompt": "x", "temperature": float("nan")}, InvalidRequest, "temperature", id="nan"
        ),
        pytest.param({"prompt": "x", "max_tokens": 0}, InvalidRequest, "max_tokens", id="none"),
        pytest.param(
            {"prompt": "x", "max_tokens": 512}, ContextLengthExceeded, "max_tokens", id="too long"
        ),
        pytest.param({"prompt": "ok"}, InstanceLost, None, id="lost on the way"),
    ],
)
async def test_errors(
    fields: dict[str, Any], expected: type[InfiniteLLMError], param: str | None
) -> None:
    worker = FakeWorker(1, fail(InstanceLost("gone"), after="some"))
    async with running([worker], resume_timeout_s=0.2) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(cluster, **fields)
    error = error_from_rpc(caught.value)
    assert (type(error), error.param) == (expected, param)


async def test_cancelling_aborts_the_request() -> None:
    worker = FakeWorker(1, hang("some"))
    async with running([worker]) as cluster:
        call = asyncio.create_task(generate(cluster, prompt="hello"))
        while not worker.requests:
            await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.wait_for(worker.aborted.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await call


async def status_of(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return int((await stub.Check(request, timeout=DEADLINE_S)).status)


async def until_status(channel: grpc.aio.Channel, status: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await status_of(channel, SERVICE_NAME) != status:
            await asyncio.sleep(0.02)


async def test_health_follows_the_instances() -> None:
    worker = FakeWorker(1, say("ok"))
    async with running([worker]) as cluster:
        channel = open_channel(cluster.grpc_address)
        await until_status(channel, health_pb2.HealthCheckResponse.SERVING)
        assert await status_of(channel, "") == health_pb2.HealthCheckResponse.SERVING
        worker.load.draining = True
        await until_status(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        await channel.close()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(cluster, prompt="hello")
        assert type(error_from_rpc(caught.value)) is Unavailable


async def test_reflection_lists_the_service() -> None:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        responses = [r async for r in stub.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in responses[0].list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
