"""A typed client of the public gRPC service, for programs that use a cluster.

It needs what every service has anyway, grpcio and the stubs: the install without extras. HTTP has
OpenAI's own client.

    async with InferenceClient("localhost:8001", api_key="sk-...") as client:
        async for piece in client.generate("Hello!", chat=True, max_tokens=64):
            print(piece.text, end="")
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypedDict, Unpack

import grpc

from protos.infinite_llm.v1 import inference_pb2, inference_pb2_grpc
from services.common.rpc import error_from_rpc, open_channel

#: Of a whole answer.
GENERATE_DEADLINE_S = 3600.0
CALL_DEADLINE_S = 10.0


class GenerateOptions(TypedDict, total=False):
    """What `GenerateRequest` offers; what is left out has its default."""

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    chat: bool
    priority: int
    cache_salt: str
    request_id: str
    json_object: bool
    json_schema: str
    regex: str
    lark: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    finish_reason: str | None
    usage: Usage | None
    """These two in the last piece."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    max_request_tokens: int
    vocab_size: int
    has_chat_template: bool
    ready: bool


class InferenceClient:
    """Connects when first used. Raises errors of `services.common.errors`."""

    def __init__(
        self, address: str, api_key: str | None = None, ca_certificate: bytes | None = None
    ) -> None:
        """`ca_certificate`: PEM, speaks TLS; b"" with the system's authorities."""
        credentials = None
        if ca_certificate is not None:
            credentials = grpc.ssl_channel_credentials(ca_certificate or None)
        self._channel = open_channel(address, credentials=credentials)
        self._stub: inference_pb2_grpc.InferenceAsyncStub
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: str,
        deadline_s: float = GENERATE_DEADLINE_S,
        **options: Unpack[GenerateOptions],
    ) -> AsyncIterator[Piece]:
        """The answer as it comes. Who stops reading closes the iterator, which ends the request."""
        request = inference_pb2.GenerateRequest(prompt=prompt, **options)
        call = self._stub.Generate(request, timeout=deadline_s, metadata=self._metadata)
        try:
            async for response in call:
                yield _piece(response)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> bool:
        """Whether there was such a request, which has ended now."""
        request = inference_pb2.AbortGenerationRequest(request_id=request_id)
        try:
            answer = await self._stub.Abort(
                request, timeout=CALL_DEADLINE_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return answer.found

    async def model_info(self) -> ModelInfo:
        request = inference_pb2.GetModelInfoRequest()
        try:
            info = await self._stub.GetModelInfo(
                request, timeout=CALL_DEADLINE_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return ModelInfo(
            info.model,
            info.max_request_tokens,
            info.vocab_size,
            info.has_chat_template,
            info.ready,
        )


def _piece(response: inference_pb2.GenerateResponse) -> Piece:
    if not response.finish_reason:
        return Piece(response.text, None, None)
    used = response.usage
    usage = Usage(used.prompt_tokens, used.completion_tokens, used.cached_tokens)
    return Piece(response.text, response.finish_reason, usage)
