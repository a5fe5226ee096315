"""Errors and trace context cross a real gRPC connection over loopback."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from protos.infinite_llm.v1 import worker_pb2 as pb
from protos.infinite_llm.v1 import worker_pb2_grpc as pb_grpc
from services.common.addresses import free_ports
from services.common.errors import (
    BY_CODE,
    ConfigError,
    DeadlineExceeded,
    InfiniteLLMError,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from services.common.rpc import PROBE_DEADLINE_S, error_from_rpc, new_server, open_channel

Stub: TypeAlias = "pb_grpc.WorkerAsyncStub"


class FakeWorker(pb_grpc.WorkerServicer):
    """Raises what it is given; records the trace id that it saw and whether it was cleaned up."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.trace_id = 0
        self.cleaned_up = asyncio.Event()

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self.trace_id = trace.get_current_span().get_span_context().trace_id
        if self.error is not None:
            raise self.error
        return pb.AbortResponse()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        return pb.DrainResponse()

    async def Undrain(self, request: pb.UndrainRequest, context: Any) -> pb.UndrainResponse:
        return pb.UndrainResponse()

    async def Generate(
        self, request: pb.GenerateTokensRequest, context: Any
    ) -> AsyncIterator[pb.GenerateTokensResponse]:
        self.trace_id = trace.get_current_span().get_span_context().trace_id
        try:
            yield pb.GenerateTokensResponse(token_ids=[1])
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.cleaned_up.set()


@asynccontextmanager
async def serving(worker: FakeWorker) -> AsyncIterator[Stub]:
    server = new_server()
    pb_grpc.add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.WorkerStub(channel)
    await server.stop(grace=None)


async def raised_by(stub: Stub) -> InfiniteLLMError:
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await stub.Abort(pb.AbortRequest(req_id=1), timeout=PROBE_DEADLINE_S)
    return error_from_rpc(info.value)


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.__name__)
async def test_every_error_arrives_as_it_was_raised(kind: type[InfiniteLLMError]) -> None:
    async with serving(FakeWorker(kind("not möglich", param="max_tokens"))) as stub:
        error = await raised_by(stub)
    assert type(error) is kind
    assert (error.message, error.param) == ("not möglich", "max_tokens")


async def test_an_error_without_param_has_none() -> None:
    async with serving(FakeWorker(InvalidRequest("no"))) as stub:
        assert (await raised_by(stub)).param is None


async def test_an_error_that_must_not_cross_becomes_internal() -> None:
    async with serving(FakeWorker(ConfigError("private"))) as stub:
        assert type(await raised_by(stub)) is InternalError


async def test_an_unexpected_exception_is_logged_and_hidden(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with serving(FakeWorker(KeyError("secret"))) as stub:
            error = await raised_by(stub)
    assert type(error) is InternalError
    assert "secret" not in error.message
    assert "KeyError: 'secret'" in caplog.text


async def test_a_stream_delivers_until_its_error() -> None:
    async with serving(FakeWorker(Unavailable("later"))) as stub:
        call = stub.Generate(pb.GenerateTokensRequest(), timeout=PROBE_DEADLINE_S)
        received: list[int] = []
        with pytest.raises(grpc.aio.AioRpcError) as info:
            async for response in call:
                received.extend(response.token_ids)
    assert received == [1]
    assert type(error_from_rpc(info.value)) is Unavailable


async def test_a_cancelled_stream_cleans_up_in_the_handler() -> None:
    worker = FakeWorker()
    async with serving(worker) as stub:
        call = stub.Generate(pb.GenerateTokensRequest(), timeout=PROBE_DEADLINE_S)
        async for _ in call:
            break
        call.cancel()
        await asyncio.wait_for(worker.cleaned_up.wait(), PROBE_DEADLINE_S)


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    (port,) = free_ports(1)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        assert type(await raised_by(pb_grpc.WorkerStub(channel))) is Unavailable


async def test_a_call_that_takes_too_long_exceeds_its_deadline() -> None:
    async with serving(FakeWorker()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as info:
            async for _ in stub.Generate(pb.GenerateTokensRequest(), timeout=0.2):
                pass
    assert type(error_from_rpc(info.value)) is DeadlineExceeded


async def test_the_handler_runs_in_the_callers_trace() -> None:
    tracer = TracerProvider().get_tracer("test")
    worker = FakeWorker()
    async with serving(worker) as stub:
        with tracer.start_as_current_span("caller") as span:
            await stub.Abort(pb.AbortRequest(), timeout=PROBE_DEADLINE_S)
            assert worker.trace_id == span.get_span_context().trace_id
            worker.trace_id = 0
            call = stub.Generate(pb.GenerateTokensRequest(), timeout=PROBE_DEADLINE_S)
            async for _ in call:
                break
            call.cancel()
            assert worker.trace_id == span.get_span_context().trace_id


async def test_large_messages_pass() -> None:
    prompt = list(range(2_000_000))
    async with serving(FakeWorker(Unavailable("done"))) as stub:
        call = stub.Generate(pb.GenerateTokensRequest(prompt_token_ids=prompt), timeout=10)
        assert [response.token_ids[0] async for response in _until_error(call)] == [1]


async def _until_error(call: Any) -> AsyncIterator[pb.GenerateTokensResponse]:
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        assert type(error_from_rpc(error)) is Unavailable
