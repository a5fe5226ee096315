"""The doors of a running cluster as the users of a trace find them. Called by `trace_replay`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import grpc
import httpx

from benchmarks.mixed_traces import Job
from protos.infinite_llm.v1 import worker_pb2, worker_pb2_grpc
from services.local.cluster import LocalCluster
from services.local.plan import HOST

#: Until an answer is whole, the queue before it included.
_ANSWER_DEADLINE_S = 240.0

#: Whether the request was served to its end.
Ask = Callable[[Job], Awaitable[bool]]


@asynccontextmanager
async def the_router(cluster: LocalCluster, salt: str) -> AsyncIterator[Ask]:
    async with httpx.AsyncClient(
        base_url=cluster.http_url,
        timeout=httpx.Timeout(_ANSWER_DEADLINE_S),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    ) as client:

        async def ask(job: Job) -> bool:
            body = {
                "model": cluster.spec.model_name,
                "prompt": job.prompt,
                "max_tokens": job.num_output,
                "temperature": 0,
                "ignore_eos": True,
                "cache_salt": salt,
            }
            try:
                response = await client.post("/v1/completions", json=body)
            except httpx.TimeoutException:
                return False
            return response.is_success

        yield ask


@asynccontextmanager
async def workers_in_turn(cluster: LocalCluster, salt: str) -> AsyncIterator[Ask]:
    """Every request goes to the next instance and waits there, whatever runs on it."""
    async with AsyncExitStack() as stack:
        stubs: list[worker_pb2_grpc.WorkerAsyncStub] = []
        for port in cluster.ports.workers:
            channel = grpc.aio.insecure_channel(f"{HOST}:{port}")
            stubs.append(worker_pb2_grpc.WorkerStub(await stack.enter_async_context(channel)))
        numbers = count(1)

        async def ask(job: Job) -> bool:
            number = next(numbers)
            request = worker_pb2.GenerateTokensRequest(
                req_id=number,
                prompt_token_ids=job.prompt,
                max_tokens=job.num_output,
                ignore_eos=True,
                cache_salt=salt,
            )
            try:
                stub = stubs[number % len(stubs)]
                async for _ in stub.Generate(request, timeout=_ANSWER_DEADLINE_S):
                    pass
            except grpc.aio.AioRpcError:
                return False
            return True

        yield ask
