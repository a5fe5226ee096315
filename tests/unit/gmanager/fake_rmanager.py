"""A source rManager that answers every MoveKvCache as told, on loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from protos.infinite_llm.v1 import worker_pb2
from services.common.rpc import new_server


class FakeRManager:
    """Without an answer it never replies."""

    def __init__(self, answer: worker_pb2.MoveKvCacheResponse | None) -> None:
        self.answer = answer
        self.requests: list[worker_pb2.MoveKvCacheRequest] = []

    async def move_kv_cache(
        self, request: worker_pb2.MoveKvCacheRequest, context: object
    ) -> worker_pb2.MoveKvCacheResponse:
        self.requests.append(request)
        while self.answer is None:
            await asyncio.Event().wait()
        return self.answer


@asynccontextmanager
async def serving(rmanager: FakeRManager) -> AsyncIterator[str]:
    """Yields the address of its RManager service."""
    handler = grpc.unary_unary_rpc_method_handler(
        rmanager.move_kv_cache,
        request_deserializer=worker_pb2.MoveKvCacheRequest.FromString,
        response_serializer=worker_pb2.MoveKvCacheResponse.SerializeToString,
    )
    handlers = {"MoveKvCache": handler}
    server = new_server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("infinite_llm.v1.RManager", handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)
