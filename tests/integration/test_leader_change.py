"""A whole cluster with two gManagers: the leader dies, and nobody who is served notices."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from services.common.addresses import split_addresses
from services.common.errors import NotLeader, Unavailable
from services.local.cluster import LocalCluster
from services.local.map_reader import ClusterView, MapReader
from services.local.plan import LEADER_LEASE_S
from tests.integration.cluster import assert_no_leak, http_client, make_spec, running_cluster
from tests.integration.test_exactness import HALF_LENT, generate, oracle, prompt_of
from tests.integration.test_faults import streaming

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(240)]


@pytest.fixture
async def cluster() -> AsyncIterator[LocalCluster]:
    async with running_cluster(replace(make_spec(2), num_gmanagers=2)) as cluster:
        yield cluster
        await assert_no_leak(cluster)


async def leader_of(cluster: LocalCluster) -> str:
    """The name of the process that answers; the other says that it does not lead."""
    leaders = []
    for number, address in enumerate(split_addresses(cluster.gmanager_address)):
        async with MapReader(address) as reader:
            try:
                await reader.read()
            except (NotLeader, Unavailable):
                continue
            leaders.append(f"gmanager-{number}")
    (leader,) = leaders
    return leader


def is_whole(view: ClusterView) -> bool:
    return len(view.instances) == 2 and any(not entry.local for entry in view.entries)


async def test_a_killed_leader_disturbs_neither_streams_nor_the_router(
    cluster: LocalCluster,
) -> None:
    body = {"model": cluster.spec.model_name, "prompt": "Once", "max_tokens": 2}
    async with streaming(cluster) as (stream, task), http_client(cluster) as client:
        before = await leader_of(cluster)
        term = (await cluster.view()).term
        await cluster.kill(before)
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        await task
    assert stream.error is None
    assert tuple(stream.tokens[:16]) == oracle(HALF_LENT)
    await cluster.restart(before)
    view = await cluster.wait_view(lambda v: v.term > term, 2 * LEADER_LEASE_S)
    assert view.term > term
    assert await leader_of(cluster) != before
    async with streaming(cluster) as (stream, task):
        view = await cluster.wait_view(is_whole, 2 * cluster.spec.heartbeat_period_s)
        assert is_whole(view)
        await task
    assert await generate(cluster, prompt_of(HALF_LENT)) == oracle(HALF_LENT)
