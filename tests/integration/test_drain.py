"""An instance leaves on purpose in the middle of streams: nobody's tokens change, nothing leaks."""

import asyncio

import grpc
import pytest

from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.errors import Unavailable
from services.local.cluster import LocalCluster
from services.local.plan import HOST, worker_name
from tests.integration.cluster import ANSWER_DEADLINE_S, worker_metric
from tests.integration.test_exactness import HALF_LENT, generate, oracle, prompt_of
from tests.integration.test_faults import (
    NUM_STREAMED,
    Stream,
    largest_creditor,
    streaming,
    undisturbed,
)

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(240)]

#: Less than what the workers of local clusters are given.
DRAIN_DEADLINE_S = 8.0
SEEDED = types_pb2.SamplingParams(temperature=0.8, top_p=0.95, seed=7)


async def call_drain(cluster: LocalCluster, inst_id: int, deadline_s: float = 0.0) -> None:
    async with grpc.aio.insecure_channel(f"{HOST}:{cluster.ports.workers[inst_id]}") as channel:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        await stub.Drain(worker_pb2.DrainRequest(deadline_s=deadline_s), timeout=5)


async def ended(cluster: LocalCluster, inst_id: int) -> int | None:
    """The exit status of a worker that ends by itself."""
    process = cluster.processes[worker_name(inst_id)]
    async with asyncio.timeout(DRAIN_DEADLINE_S + 5.0):
        while process.is_running:
            await asyncio.sleep(0.05)
    return process.exit_status


async def work_lost(cluster: LocalCluster) -> float:
    """What worker 0 has had to compute again so far."""
    preempted = await worker_metric(cluster, 0, "preemptions_total")
    return preempted + await worker_metric(cluster, 0, "recomputed_total")


@pytest.mark.parametrize("sampling", [None, SEEDED], ids=["greedy", "seeded"])
async def test_a_drained_creditor_changes_no_token_and_costs_no_computation(
    hurt_trio: LocalCluster, sampling: types_pb2.SamplingParams | None
) -> None:
    alone = Stream(hurt_trio, sampling)
    await alone.run()
    before = await work_lost(hurt_trio)
    async with streaming(hurt_trio, sampling) as (stream, task):
        creditor, held = await largest_creditor(hurt_trio)
        process = hurt_trio.processes[worker_name(creditor)]
        assert await process.stop(DRAIN_DEADLINE_S)
        assert process.exit_status == 0
        assert not task.done()  # or it would not have been in the middle
        await task
    assert (stream.error, stream.tokens) == (None, alone.tokens)
    assert await work_lost(hurt_trio) == before
    lent_on = await worker_metric(hurt_trio, 0, "lent_on_blocks_total")
    assert lent_on + await worker_metric(hurt_trio, 0, "taken_back_blocks_total") >= held


async def test_a_drained_owner_ends_what_runs_and_then_itself(hurt_trio: LocalCluster) -> None:
    expected = await undisturbed(hurt_trio)
    async with streaming(hurt_trio) as (stream, task):
        await call_drain(hurt_trio, 0, deadline_s=ANSWER_DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(hurt_trio, prompt_of(20))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await task
    assert (stream.error, stream.tokens) == (None, expected)
    assert await ended(hurt_trio, 0) == 0


async def test_what_has_not_ended_by_the_deadline_ends_with_an_error(
    hurt_trio: LocalCluster,
) -> None:
    async with streaming(hurt_trio) as (stream, task):
        await call_drain(hurt_trio, 0, deadline_s=0.2)
        await task
    assert isinstance(stream.error, Unavailable)
    assert tuple(stream.tokens[:16]) == oracle(HALF_LENT)[: len(stream.tokens)]
    assert len(stream.tokens) < NUM_STREAMED
    assert await ended(hurt_trio, 0) == 0
