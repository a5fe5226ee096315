"""Real clusters for integration tests: the supervisor's own class, with small pools.

`conftest` hands them out as fixtures; a test that must hurt or shape a cluster makes its own with
`running_cluster`.
"""

import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from services.common.addresses import split_host_port
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.local.cluster import LocalCluster
from services.local.map_reader import ClusterView, is_idle
from services.local.plan import ClusterSpec, ProcessSpec, worker_name
from services.local.preflight import find_redis_server
from services.local.progress import Progress

#: Small enough that a prompt of a few hundred tokens does not fit one instance.
NUM_BLOCKS = 24
BLOCK_SIZE = 16
CAPACITY_TOKENS = NUM_BLOCKS * BLOCK_SIZE
#: Heartbeats come several times a second; leases that nobody renews take the longest to end.
RELEASE_DEADLINE_S = 20.0
#: For a whole answer of a few dozen tokens on two busy cores.
ANSWER_DEADLINE_S = 90.0


def make_spec(num_instances: int, num_blocks: int = NUM_BLOCKS) -> ClusterSpec:
    """Of the default model, which is fetched and converted at the first use on a machine."""
    model = resolve(DEFAULT_MODEL, default_cache_dir(os.environ), lambda _: None)
    return ClusterSpec(
        model=model,
        model_name=DEFAULT_MODEL,
        num_instances=num_instances,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_cores=len(os.sched_getaffinity(0)),
        # Whoever reads a block that was freed or lent away reads NaN and answers nonsense.
        overrides={"worker": {"poison_freed_blocks": True, "keep_remote_prefix_s": 5.0}},
    )


@asynccontextmanager
async def running_cluster(
    spec: ClusterSpec, place: Callable[[ProcessSpec], ProcessSpec] = lambda process: process
) -> AsyncIterator[LocalCluster]:
    """Started and stopped around the block. Its folder is short: it holds Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="infinite-llm-test-") as folder:
        redis_server = find_redis_server(os.environ)
        cluster = LocalCluster(spec, Path(folder), redis_server, os.environ, place)
        await cluster.start(Progress(print))
        try:
            yield cluster
        finally:
            await cluster.stop(print)


async def assert_no_leak(cluster: LocalCluster) -> None:
    """Every pool is full again, nothing is lent or borrowed, and the map has no rows."""
    view = await wait_idle(cluster)
    assert is_whole(cluster, view) and is_idle(view), describe(view)


async def leaked_blocks(cluster: LocalCluster) -> int:
    """Blocks that do not become free although nothing runs; all of an instance that is gone."""
    view = await wait_idle(cluster)
    if not (is_whole(cluster, view) and is_idle(view)):
        print(describe(view))
    num_blocks = cluster.spec.num_instances * cluster.spec.num_blocks
    return num_blocks - sum(instance.load.free_blocks for instance in view.instances)


async def wait_idle(cluster: LocalCluster) -> ClusterView:
    """The view once nothing runs any more, or as it is when it should have been so long ago."""
    return await cluster.wait_view(
        lambda view: is_whole(cluster, view) and is_idle(view), RELEASE_DEADLINE_S
    )


def is_whole(cluster: LocalCluster, view: ClusterView) -> bool:
    return len(view.instances) == cluster.spec.num_instances


async def worker_metric(cluster: LocalCluster, inst_id: int, name: str) -> float:
    """What one worker says of `infinite_llm_worker_<name>` now."""
    host, _ = split_host_port(cluster.processes[worker_name(inst_id)].spec.address)
    url = f"http://{host}:{cluster.ports.worker_metrics[inst_id]}/metrics"
    async with httpx.AsyncClient(trust_env=False) as http:
        lines = (await http.get(url)).text.splitlines()
    start = f"infinite_llm_worker_{name} "
    return next(float(line.removeprefix(start)) for line in lines if line.startswith(start))


def describe(view: ClusterView) -> str:
    loads = (
        f"instance {instance.info.inst_id}: {instance.load.free_blocks} of "
        f"{instance.info.num_blocks} blocks free, {instance.load.lent_blocks} lent, "
        f"{instance.load.borrowed_blocks} borrowed"
        for instance in view.instances
    )
    rows = (
        f"request {entry.req_id:x}: {entry.num_blocks} blocks on {entry.inst_id}"
        for entry in view.entries
    )
    return "\n".join((*loads, *rows))


def http_client(cluster: LocalCluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.http_url, timeout=ANSWER_DEADLINE_S, trust_env=False)
