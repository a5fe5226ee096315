"""A process dies while a request streams: right tokens or a clear error, in time, and no leak.

The request needs both instances, so that the loss of either matters.
"""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.errors import InfiniteLLMError
from services.common.ids import new_req_id
from services.common.rpc import error_from_rpc
from services.local.cluster import LocalCluster
from services.local.plan import HOST
from tests.integration.cluster import ANSWER_DEADLINE_S, BLOCK_SIZE, http_client, worker_metric
from tests.integration.test_exactness import HALF_LENT, SHORT, generate, oracle, prompt_of

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(240)]

#: Long enough that a fault hits the middle; its first tokens are the oracle's.
NUM_STREAMED = 40
#: Blocks: a request that decodes lends no more at once.
MAX_IN_FLIGHT = 2


class Stream:
    """One running answer of worker 0, and what has come of it so far."""

    def __init__(
        self, cluster: LocalCluster, sampling: types_pb2.SamplingParams | None = None
    ) -> None:
        self._cluster = cluster
        self._sampling = sampling
        self.tokens: list[int] = []
        self.error: InfiniteLLMError | None = None

    async def run(self) -> None:
        request = worker_pb2.GenerateTokensRequest(
            req_id=new_req_id(),
            prompt_token_ids=prompt_of(HALF_LENT),
            max_tokens=NUM_STREAMED,
            sampling=self._sampling,
            ignore_eos=True,
        )
        async with grpc.aio.insecure_channel(f"{HOST}:{self._cluster.ports.workers[0]}") as channel:
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            try:
                async for answer in stub.Generate(request, timeout=2 * ANSWER_DEADLINE_S):
                    self.tokens += answer.token_ids
            except grpc.aio.AioRpcError as error:
                self.error = error_from_rpc(error)

    async def reached(self, num_tokens: int) -> None:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            while len(self.tokens) < num_tokens:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def streaming(
    cluster: LocalCluster, sampling: types_pb2.SamplingParams | None = None
) -> AsyncIterator[tuple[Stream, asyncio.Task[None]]]:
    """An answer in the middle of its decoding, half of its blocks lent."""
    stream = Stream(cluster, sampling)
    task = asyncio.create_task(stream.run())
    try:
        await stream.reached(4)
        view = await cluster.view()
        assert sum(entry.num_blocks for entry in view.entries if not entry.local) > 10
        yield stream, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def undisturbed(cluster: LocalCluster) -> list[int]:
    stream = Stream(cluster)
    await stream.run()
    assert stream.error is None
    assert tuple(stream.tokens[:16]) == oracle(HALF_LENT)
    return stream.tokens


async def test_a_killed_gmanager_does_not_disturb_a_stream(hurt: LocalCluster) -> None:
    expected = await undisturbed(hurt)
    async with streaming(hurt) as (stream, task):
        await hurt.kill("gmanager")
        await task
    assert (stream.error, stream.tokens) == (None, expected)
    assert await generate(hurt, prompt_of(SHORT)) == oracle(SHORT)
    # Borrowing goes on from the last view, too.
    assert await generate(hurt, prompt_of(HALF_LENT)) == oracle(HALF_LENT)


async def test_a_killed_redis_does_not_disturb_a_stream(hurt: LocalCluster) -> None:
    async with streaming(hurt) as (stream, task):
        await hurt.kill("redis")
        await task
    assert stream.error is None
    assert tuple(stream.tokens[:16]) == oracle(HALF_LENT)


async def test_a_killed_creditor_costs_a_recomputation_or_a_clear_error(
    hurt: LocalCluster,
) -> None:
    async with streaming(hurt) as (stream, task):
        await hurt.kill("worker-1")
        await hurt.restart("worker-1")
        await task
    assert_right_or_refused(stream)
    assert await generate(hurt, prompt_of(HALF_LENT)) == oracle(HALF_LENT)


async def test_a_killed_creditor_costs_the_tokens_that_it_held_and_no_others(
    hurt_trio: LocalCluster,
) -> None:
    async with streaming(hurt_trio) as (stream, task):
        creditor, held = await largest_creditor(hurt_trio)
        await hurt_trio.kill(f"worker-{creditor}")
        await task
    assert stream.error is None
    recomputed = await worker_metric(hurt_trio, 0, "recomputed_tokens_total")
    assert await worker_metric(hurt_trio, 0, "recomputed_total") == 1
    assert 0 < recomputed <= (held + MAX_IN_FLIGHT) * BLOCK_SIZE < HALF_LENT
    assert await worker_metric(hurt_trio, 0, "preemptions_total") == 0
    assert stream.tokens == await undisturbed(hurt_trio)


async def largest_creditor(cluster: LocalCluster) -> tuple[int, int]:
    """Who lends most to worker 0, and how many blocks."""
    async with asyncio.timeout(ANSWER_DEADLINE_S):
        while True:
            lent: Counter[int] = Counter()
            for entry in (await cluster.view()).entries:
                if not entry.local:
                    lent[entry.inst_id] += entry.num_blocks
            if lent.total() == await worker_metric(cluster, 0, "kv_blocks_borrowed"):
                return lent.most_common(1)[0]
            await asyncio.sleep(0.05)


async def test_a_stopped_creditor_hangs_nobody(hurt: LocalCluster) -> None:
    pid = hurt.processes["worker-1"].pid
    assert pid is not None
    async with streaming(hurt) as (stream, task):
        os.kill(pid, signal.SIGSTOP)
        try:
            # Needs no creditor, and waits no longer than one attention deadline.
            assert await generate(hurt, prompt_of(SHORT)) == oracle(SHORT)
        finally:
            os.kill(pid, signal.SIGCONT)
        await task
    assert_right_or_refused(stream)


async def test_a_killed_owner_is_waited_for_where_nobody_else_has_the_room(
    hurt: LocalCluster,
) -> None:
    """Through the router, as a client sees it; worker 0 or 1, whichever owns the request."""
    body: dict[str, object] = {
        "model": hurt.spec.model_name,
        "prompt": list(prompt_of(HALF_LENT)),
        "max_tokens": NUM_STREAMED,
        "stream": True,
        "temperature": 0,
        "ignore_eos": True,
    }
    await assert_served(hurt, body)
    expected = await text_of(hurt, body)
    assert await text_of(hurt, body, kill_owner_after=4) == expected
    await assert_served(hurt, body)


async def text_of(cluster: LocalCluster, body: dict[str, object], kill_owner_after: int = 0) -> str:
    """Of the whole stream; its owner dies after so many events, and is started again."""
    text, num_events = "", 0
    async with (
        http_client(cluster) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += event["choices"][0]["text"]
            num_events += 1
            if num_events == kill_owner_after:
                view = await cluster.view()
                owner = next(e.owner_inst_id for e in view.entries if not e.local)
                await cluster.kill(f"worker-{owner}")
                await cluster.restart(f"worker-{owner}")
    return text


async def assert_served(cluster: LocalCluster, body: dict[str, object]) -> None:
    """A request that needs both instances is refused until the router has seen both again."""
    once = body | {"stream": False, "max_tokens": 1}
    async with http_client(cluster) as client, asyncio.timeout(ANSWER_DEADLINE_S):
        while (answer := await client.post("/v1/completions", json=once)).status_code == 400:
            await asyncio.sleep(0.1)
    assert answer.status_code == 200, answer.text


def assert_right_or_refused(stream: Stream) -> None:
    """Never wrong tokens: what came is the oracle's, all of it or up to an error that says why."""
    assert tuple(stream.tokens[:16]) == oracle(HALF_LENT)[: len(stream.tokens)]
    if stream.error is None:
        assert len(stream.tokens) == NUM_STREAMED
    else:
        assert stream.error.is_retryable, stream.error
