"""A local cluster for the time of a benchmark, and what measures through its doors."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import grpc

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.errors import InternalError
from services.common.rpc import CONTROL_DEADLINE_S
from services.local.cluster import LocalCluster
from services.local.plan import HOST, ClusterSpec
from services.local.preflight import find_redis_server
from services.local.progress import Progress

#: Nothing that is waited for takes longer.
_PATIENCE_S = 300.0


@asynccontextmanager
async def running_cluster(spec: ClusterSpec) -> AsyncIterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="infinite-llm-") as folder:
        cluster = LocalCluster(spec, Path(folder), find_redis_server(os.environ), os.environ)
        await cluster.start(Progress(lambda _: None))
        try:
            yield cluster
        finally:
            await cluster.stop()


class TokenStream:
    """One request at a worker's own door; remembers when each of its tokens came."""

    def __init__(
        self, stub: "worker_pb2_grpc.WorkerAsyncStub", req_id: int, prompt: Sequence[int], num: int
    ) -> None:
        self.req_id = req_id
        self._times_s: list[float] = []
        self._news = asyncio.Event()
        request = worker_pb2.GenerateTokensRequest(
            req_id=req_id, prompt_token_ids=prompt, max_tokens=num, ignore_eos=True
        )
        self._reader = asyncio.create_task(self._read(stub, request))

    async def begun(self) -> None:
        await self._reach(1)

    async def steps(self, num_steps: int) -> list[float]:
        """How long each of the next steps takes, from token to token."""
        begin = len(self._times_s)
        await self._reach(begin + num_steps + 1)
        times_s = self._times_s[begin : begin + num_steps + 1]
        return [after - before for before, after in pairwise(times_s)]

    async def cancel(self) -> None:
        """The worker forgets the request, too."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(
        self,
        stub: "worker_pb2_grpc.WorkerAsyncStub",
        request: worker_pb2.GenerateTokensRequest,
    ) -> None:
        async for _ in stub.Generate(request, timeout=_PATIENCE_S):
            self._times_s.append(time.perf_counter())
            self._news.set()

    async def _reach(self, num_tokens: int) -> None:
        while len(self._times_s) < num_tokens:
            self._news.clear()
            waiting = asyncio.create_task(self._news.wait())
            await asyncio.wait({waiting, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self._reader.done() and len(self._times_s) < num_tokens:
                self._reader.result()
                raise InternalError("a request ended before it was measured")


class Pair:
    """The first two instances of a cluster: the owner of all requests, and one that is idle."""

    def __init__(self, cluster: LocalCluster, channel: grpc.aio.Channel) -> None:
        self._cluster = cluster
        self._rmanager: worker_pb2_grpc.RManagerAsyncStub = worker_pb2_grpc.RManagerStub(channel)
        self._worker: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        self._last_req_id = 0
        self._term = 0

    @asynccontextmanager
    async def streams(
        self, prompts: Sequence[Sequence[int]], num: int
    ) -> AsyncIterator[list[TokenStream]]:
        """All of them decoding; forgotten at the end."""
        async with AsyncExitStack() as stack:
            streams = []
            for prompt in prompts:
                self._last_req_id += 1
                stream = TokenStream(self._worker, self._last_req_id, prompt, num)
                stack.push_async_callback(stream.cancel)
                streams.append(stream)
            for stream in streams:
                await stream.begun()
            yield streams

    async def move(self, req_id: int, num_blocks: int) -> bool:
        """Order a planned move to the idle instance, in the term of the gManager."""
        request = worker_pb2.MoveKvCacheRequest(
            req_id=req_id, num_blocks=num_blocks, dst=await self._destination(), term=self._term
        )
        answer = await self._rmanager.MoveKvCache(request, timeout=CONTROL_DEADLINE_S)
        self._term = answer.highest_term
        return answer.accepted

    async def borrowed_blocks(self) -> int:
        view = await self._cluster.view()
        return sum(instance.load.borrowed_blocks for instance in view.instances)

    async def _destination(self) -> types_pb2.InstanceInfo:
        view = await self._cluster.view()
        return next(i.info for i in view.instances if i.info.inst_id == 1)


@asynccontextmanager
async def running_pair(spec: ClusterSpec) -> AsyncIterator[Pair]:
    async with (
        running_cluster(spec) as cluster,
        grpc.aio.insecure_channel(f"{HOST}:{cluster.ports.workers[0]}") as channel,
    ):
        yield Pair(cluster, channel)
