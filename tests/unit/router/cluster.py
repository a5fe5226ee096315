"""Fakes on real sockets: scripted workers and a gManager that lists them.

What a worker answers is its script; what it was asked is kept for the tests to look at.
"""

import asyncio
import atexit
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from protos.infinite_llm.v1 import (
    gmanager_pb2,
    gmanager_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from services.common.rpc import new_server
from services.router.config import RouterConfig
from services.router.grammars.checks import GrammarChecks
from services.router.router import Router
from services.router.served_model import ServedModel
from services.router.text.chat_template import ChatTemplate
from services.router.text.tokenizer import Tokenizer
from tests.unit.router.vocabulary import TEMPLATE, byte_level_bpe

MODEL = "tiny"
BLOCK_SIZE = 16
TOKENIZER = byte_level_bpe()
STOP = worker_pb2.FINISH_REASON_STOP
LENGTH = worker_pb2.FINISH_REASON_LENGTH

Script = Callable[
    [worker_pb2.GenerateTokensRequest], AsyncIterator[worker_pb2.GenerateTokensResponse]
]


def say(
    text: str, finish_reason: worker_pb2.FinishReason.ValueType = STOP, size: int = 1
) -> Script:
    """Answers with the tokens of `text`, `size` a message, up to max_tokens."""

    async def script(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        token_ids = TOKENIZER.encode(text).ids
        reason = finish_reason
        if len(token_ids) > request.max_tokens:
            token_ids, reason = token_ids[: request.max_tokens], LENGTH
        for start in range(0, len(token_ids), size):
            chunk = token_ids[start : start + size]
            yield worker_pb2.GenerateTokensResponse(token_ids=chunk)
        yield worker_pb2.GenerateTokensResponse(finish_reason=reason)

    return script


def fail(error: Exception, after: str = "") -> Script:
    """Answers with `after`, then raises."""

    async def script(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        for token_id in TOKENIZER.encode(after).ids:
            yield worker_pb2.GenerateTokensResponse(token_ids=[token_id])
        raise error

    return script


def hang(after: str = "") -> Script:
    """Answers with `after`, then nothing more."""

    async def script(
        request: worker_pb2.GenerateTokensRequest,
    ) -> AsyncIterator[worker_pb2.GenerateTokensResponse]:
        for token_id in TOKENIZER.encode(after).ids:
            yield worker_pb2.GenerateTokensResponse(token_ids=[token_id])
        await asyncio.Event().wait()

    return script


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    inst_id: int
    script: Script
    incarnation: int = 1
    num_blocks: int = 64
    max_model_len: int = 512
    load: types_pb2.InstanceLoad = field(default_factory=types_pb2.InstanceLoad)
    address: str = ""
    requests: list[worker_pb2.GenerateTokensRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for response in self.script(request):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.set()
            raise

    async def Abort(self, request: Any, context: Any) -> Any:
        return worker_pb2.AbortResponse()

    async def Drain(self, request: Any, context: Any) -> Any:
        return worker_pb2.DrainResponse()

    async def Undrain(self, request: Any, context: Any) -> Any:
        return worker_pb2.UndrainResponse()

    def view(self) -> types_pb2.InstanceView:
        info = types_pb2.InstanceInfo(
            inst_id=self.inst_id,
            incarnation=self.incarnation,
            control_address=self.address,
            model=MODEL,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
        )
        load = types_pb2.InstanceLoad(free_blocks=self.num_blocks)
        load.MergeFrom(self.load)
        return types_pb2.InstanceView(info=info, load=load, age_s=0.1)


class FakeGManager(gmanager_pb2_grpc.GManagerServicer):
    def __init__(self, workers: Sequence[FakeWorker]) -> None:
        self.workers = list(workers)

    async def GetClusterView(self, request: Any, context: Any) -> Any:
        return gmanager_pb2.GetClusterViewResponse(instances=[w.view() for w in self.workers])


@dataclass
class Cluster:
    router: Router
    gmanager: FakeGManager
    workers: list[FakeWorker]
    stop: asyncio.Event
    stop_worker: Callable[[FakeWorker], Awaitable[None]]
    stop_gmanager: Callable[[], Awaitable[None]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.router.grpc_port}"


@cache
def tiny_folder() -> Path:
    """What the checks of grammars read; there until the tests end."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    TOKENIZER.save(f"{folder.name}/tokenizer.json")
    return Path(folder.name)


def served_model(template: str = TEMPLATE, compile_deadline_s: float = 10.0) -> ServedModel:
    return ServedModel(
        name=MODEL,
        created=1_700_000_000,
        tokenizer=Tokenizer(byte_level_bpe()),
        template=ChatTemplate(template, {}),
        grammars=GrammarChecks(tiny_folder(), compile_deadline_s=compile_deadline_s),
    )


@asynccontextmanager
async def running(
    workers: Sequence[FakeWorker], model: ServedModel | None = None, /, **settings: Any
) -> AsyncIterator[Cluster]:
    """A router over loopback with these workers behind it, stopped cleanly at the end."""
    async with AsyncExitStack() as stack:
        servers = {}
        for worker in workers:
            server = new_server()
            worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
            worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            servers[worker.inst_id] = server
            stack.push_async_callback(server.stop, None)
        gmanager = FakeGManager(workers)  # type: ignore[abstract]  # only the view is asked for
        directory = new_server()
        gmanager_pb2_grpc.add_GManagerServicer_to_server(gmanager, directory)
        port = directory.add_insecure_port("127.0.0.1:0")
        await directory.start()
        stack.push_async_callback(directory.stop, None)
        config = RouterConfig(
            http_port=0,
            grpc_port=0,
            gmanager_address=f"127.0.0.1:{port}",
            model=MODEL,
            **{"shutdown_timeout_s": 1.0, **settings},
        )
        router = Router(config, model or served_model())
        stop = asyncio.Event()

        async def stop_worker(worker: FakeWorker) -> None:
            await servers[worker.inst_id].stop(None)

        async def stop_gmanager() -> None:
            await directory.stop(None)

        serving = asyncio.create_task(router.serve(stop))
        await router.started.wait()
        cluster = Cluster(router, gmanager, list(workers), stop, stop_worker, stop_gmanager)
        try:
            yield cluster
        finally:
            stop.set()
            await serving
