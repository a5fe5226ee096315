"""Clusters shared by the integration tests, and the leak check after every one of them."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.local.cluster import LocalCluster
from tests.integration.cluster import NUM_BLOCKS, assert_no_leak, make_spec, running_cluster
from tests.integration.redis_server import RedisServer, running_redis


class ClusterPool:
    """Starts each kind of cluster at its first use and keeps it for the session.

    For tests that leave a cluster as they found it. Called from synchronous fixtures only: it runs
    a loop of its own, since clusters outlive the loops of single tests.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._stack = AsyncExitStack()
        self._clusters: dict[tuple[str, int, int], LocalCluster] = {}
        self._in_use: list[LocalCluster] = []

    def get(self, num_instances: int, num_blocks: int, purpose: str = "") -> LocalCluster:
        """One cluster per size and purpose."""
        key = (purpose, num_instances, num_blocks)
        if key not in self._clusters:
            starting = running_cluster(make_spec(num_instances, num_blocks))
            self._clusters[key] = self._runner.run(self._stack.enter_async_context(starting))
        self._in_use.append(self._clusters[key])
        return self._clusters[key]

    def check_used(self) -> None:
        """Asserts that no cluster used since the last check has leaked."""
        used, self._in_use = self._in_use, []
        for cluster in used:
            self._runner.run(assert_no_leak(cluster))

    def heal(self, cluster: LocalCluster) -> None:
        """Starts again whatever a test has killed."""
        for name, process in cluster.processes.items():
            if not process.is_running:
                self._runner.run(cluster.restart(name))

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()


@pytest.fixture(scope="session")
def cluster_pool() -> Iterator[ClusterPool]:
    pool = ClusterPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_leak(cluster_pool: ClusterPool) -> Iterator[None]:
    yield
    cluster_pool.check_used()


@pytest.fixture
def pair(cluster_pool: ClusterPool, no_leak: None) -> LocalCluster:
    """Two small instances."""
    return cluster_pool.get(2, NUM_BLOCKS)


@pytest.fixture
def quad(cluster_pool: ClusterPool, no_leak: None) -> LocalCluster:
    """Four small instances."""
    return cluster_pool.get(4, NUM_BLOCKS)


@pytest.fixture
def big(cluster_pool: ClusterPool, no_leak: None) -> LocalCluster:
    """One instance with as much memory as four small ones: never lends, never borrows."""
    return cluster_pool.get(1, 4 * NUM_BLOCKS)


@pytest.fixture
def roomy(cluster_pool: ClusterPool, no_leak: None) -> Iterator[LocalCluster]:
    """The same with room for many streams on either of the two."""
    cluster = cluster_pool.get(2, 4 * NUM_BLOCKS, "hurt")
    yield cluster
    cluster_pool.heal(cluster)


@pytest.fixture
def hurt(cluster_pool: ClusterPool, no_leak: None) -> Iterator[LocalCluster]:
    """Two small instances for tests that kill processes; whole again after each test."""
    cluster = cluster_pool.get(2, NUM_BLOCKS, "hurt")
    yield cluster
    cluster_pool.heal(cluster)


@pytest.fixture
def hurt_trio(cluster_pool: ClusterPool, no_leak: None) -> Iterator[LocalCluster]:
    """The same with three instances, of which two have room for what the third held."""
    cluster = cluster_pool.get(3, NUM_BLOCKS, "hurt")
    yield cluster
    cluster_pool.heal(cluster)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server
