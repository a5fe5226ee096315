"""The public gRPC front door: text in, text out, through the same path as HTTP."""

import asyncio
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from protos.infinite_llm.v1 import inference_pb2, inference_pb2_grpc
from services.common.errors import ConfigError, DeadlineExceeded
from services.common.ids import new_req_id
from services.common.rpc import new_server
from services.common.sampling import SamplingParams
from services.common.telemetry import req_id_context
from services.router.access.grpc_guard import GrpcGuard
from services.router.access.key_file import KeyFile
from services.router.choice import TextEvent
from services.router.generation import Generation
from services.router.grammars.output_grammar import OutputGrammar
from services.router.metrics import RouterMetrics
from services.router.named_requests import NamedRequests
from services.router.readiness import Readiness
from services.router.request import CHAT_MAX_TOKENS, ChatPrompt, Prompt, TextRequest
from services.router.tls import ServerTls

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_ROUTE = f"/{SERVICE_NAME}/Generate"


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(
        self,
        generation: Generation,
        readiness: Readiness,
        metrics: RouterMetrics,
        write_timeout_s: float,
    ) -> None:
        self._generation = generation
        self._named = NamedRequests()
        self._readiness = readiness
        self._metrics = metrics
        self._write_timeout_s = write_timeout_s

    async def Generate(  # type: ignore[override]  # it writes to the context itself
        self,
        request: inference_pb2.GenerateRequest,
        context: _Context,
    ) -> None:
        req_id_context.set(new_req_id())
        status = "ERROR"
        last = inference_pb2.GenerateResponse()

        async def write(response: inference_pb2.GenerateResponse) -> None:
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await context.write(response)
            except TimeoutError:
                raise DeadlineExceeded("the client does not read its stream") from None

        async def emit(event: TextEvent) -> None:
            if event.finish_reason is None:
                await write(inference_pb2.GenerateResponse(text=event.text))
            else:
                last.text, last.finish_reason = event.text, event.finish_reason

        try:
            with self._metrics.in_flight.track_inprogress():
                work = self._generation.run(self._text_request(request), emit)
                usage = await self._named.run(request.request_id, work)
                last.usage.prompt_tokens = usage.prompt_tokens
                last.usage.completion_tokens = usage.completion_tokens
                last.usage.cached_tokens = usage.cached_tokens
                await write(last)
            status = "OK"
        finally:
            self._metrics.requests.labels(_ROUTE, status).inc()

    async def Abort(
        self, request: inference_pb2.AbortGenerationRequest, context: _Context
    ) -> inference_pb2.AbortGenerationResponse:
        found = await self._named.abort(request.request_id)
        return inference_pb2.AbortGenerationResponse(found=found)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: _Context
    ) -> inference_pb2.GetModelInfoResponse:
        model = self._generation.model
        return inference_pb2.GetModelInfoResponse(
            model=model.name,
            max_request_tokens=self._generation.max_request_tokens,
            vocab_size=model.tokenizer.vocab_size,
            has_chat_template=model.template is not None,
            ready=self._readiness.is_ready,
        )

    def _text_request(self, request: inference_pb2.GenerateRequest) -> TextRequest:
        prompt: Prompt = request.prompt
        if request.chat:
            prompt = ChatPrompt(({"role": "user", "content": request.prompt},))
        return TextRequest(
            model=request.model or self._generation.model.name,
            prompts=(prompt,),
            max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
            default_max_tokens=CHAT_MAX_TOKENS,
            sampling=_sampling(request),
            seed=request.seed if request.HasField("seed") else None,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            priority=request.priority,
            cache_salt=request.cache_salt,
            grammar=_grammar(request),
        )


def _sampling(request: inference_pb2.GenerateRequest) -> SamplingParams:
    has_repetition = request.HasField("repetition_penalty")
    return SamplingParams(
        temperature=request.temperature if request.HasField("temperature") else 1.0,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty if has_repetition else 1.0,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=dict(request.logit_bias),
        min_tokens=request.min_tokens,
    )


def _grammar(request: inference_pb2.GenerateRequest) -> OutputGrammar | None:
    match request.WhichOneof("format"):
        case "json_object" if request.json_object:
            return OutputGrammar.of_schema({"type": "object"}, "json_object")
        case "json_schema":
            return OutputGrammar.of_schema_text(request.json_schema, "json_schema")
        case "regex":
            return OutputGrammar.of_regex(request.regex, "regex")
        case "lark":
            return OutputGrammar.of_lark(request.lark, "lark")
    return None


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    max_request_bytes: int
    keys: KeyFile | None
    """None: everybody may come in."""
    tls: ServerTls | None


class GrpcServer:
    """Binds at construction; port 0 takes a free one."""

    def __init__(
        self, servicer: InferenceServicer, host: str, port: int, limits: GrpcLimits
    ) -> None:
        guards = [] if limits.keys is None else [GrpcGuard(limits.keys)]
        self.server = new_server(guards, limits.max_request_bytes)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, self.server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if limits.tls is None:
                self.port = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, limits.tls.grpc_credentials())
        except RuntimeError as error:
            raise ConfigError(f"INFINITE_LLM_GRPC_PORT: cannot listen on {address}") from error
