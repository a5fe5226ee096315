"""The gManager's store beside a real Redis that is killed, frozen, emptied and made read-only.

Whenever Redis is well, it holds the whole map; whatever it does, it costs no more than a deadline.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.gmanager.cluster import Cluster, InstanceLoad
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import PlacementMap
from services.gmanager.store import (
    INSTANCES_KEY,
    MAX_DIRTY_KEYS,
    PLACEMENTS_KEY,
    REDIS_DEADLINE_S,
    Store,
    connect,
)
from tests.integration.redis_server import RedisServer, eventually
from tests.unit.gmanager.builders import make_heartbeat, make_info, make_row

pytestmark = pytest.mark.integration


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@dataclass
class Keeping:
    """A map with one instance and one row, and its store."""

    url: str
    placement_map: PlacementMap = field(default_factory=PlacementMap)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    sequence_number: int = 0

    def __post_init__(self) -> None:
        redis_up = GManagerMetrics(self.registry).redis_up
        self.store = Store(connect(self.url), self.placement_map, redis_up)
        self.store.record(self.placement_map.register(make_info(1), 0.0))
        self.report(7, 3)

    def report(self, req_id: int, num_blocks: int) -> None:
        self.sequence_number += 1
        heartbeat = make_heartbeat(
            1,
            self.sequence_number,
            make_row(req_id, 1, num_blocks),
            full=self.sequence_number == 1,
            load=InstanceLoad(free_blocks=90, running=self.sequence_number),
        )
        self.store.record(self.placement_map.apply_heartbeat(heartbeat, 0.0).delta)

    def is_redis_up(self) -> bool:
        return self.registry.get_sample_value("infinite_llm_gmanager_redis_up") == 1.0

    async def is_copied(self) -> bool:
        """Whether a process that starts now would find this very map."""
        restored = PlacementMap()
        restored.restore(await loaded(self.url), now_s=0.0)
        return essence(restored) == essence(self.placement_map)


def essence(placement_map: PlacementMap) -> object:
    cluster = placement_map.cluster()
    return [(instance.info, instance.load) for instance in cluster.instances], cluster.entries


async def loaded(url: str) -> Cluster:
    store = Store(connect(url), PlacementMap(), GManagerMetrics(CollectorRegistry()).redis_up)
    try:
        return await store.load(now_s=0.0)
    finally:
        await store.close()


@pytest.fixture
async def keeping(redis_server: RedisServer) -> AsyncIterator[Keeping]:
    keeping = Keeping(redis_server.url)
    await keeping.store.flush()
    yield keeping
    await keeping.store.close()


async def test_deltas_make_up_the_whole_map(keeping: Keeping) -> None:
    assert keeping.is_redis_up()
    assert await keeping.is_copied()
    for req_id, num_blocks in [(7, 4), (8, 1), (7, 0), (9, 2)]:
        keeping.report(req_id, num_blocks)
        await keeping.store.flush()
        assert await keeping.is_copied()
    keeping.store.record(keeping.placement_map.expire(9.0, timeout_s=3.0))
    await keeping.store.flush()
    assert await keeping.is_copied()


async def test_a_killed_redis_gets_the_whole_map_when_it_is_back(
    keeping: Keeping, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.kill()
    for req_id in (8, 9):
        keeping.report(req_id, 1)
        await keeping.store.flush()
    assert not keeping.is_redis_up()
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1
    redis_server.start()
    assert not await keeping.is_copied()
    await keeping.store.flush()
    assert keeping.is_redis_up()
    assert await keeping.is_copied()


async def test_a_restart_between_two_writes_is_noticed(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    redis_server.kill()
    redis_server.start()
    keeping.report(8, 1)
    await keeping.store.flush()  # may meet the broken connection
    await keeping.store.flush()
    assert await keeping.is_copied()


async def test_a_redis_that_lost_its_data_is_noticed(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        client.flushall()
    keeping.report(8, 1)
    await keeping.store.flush()
    assert await keeping.is_copied()


async def test_the_writer_tries_again_by_itself(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    redis_server.kill()
    writer = asyncio.create_task(keeping.store.run())
    keeping.report(8, 1)
    await eventually(lambda: not keeping.is_redis_up())
    redis_server.start()
    await eventually(keeping.is_redis_up)
    assert await keeping.is_copied()
    writer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writer


async def test_a_frozen_redis_costs_a_deadline_and_not_more(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    redis_server.process.send_signal(signal.SIGSTOP)
    keeping.report(8, 1)
    async with asyncio.timeout(3 * REDIS_DEADLINE_S):
        await keeping.store.flush()
    assert not keeping.is_redis_up()
    async with asyncio.timeout(2 * REDIS_DEADLINE_S):
        assert await loaded(redis_server.url) == Cluster()
    redis_server.process.send_signal(signal.SIGCONT)
    await keeping.store.flush()
    assert await keeping.is_copied()


async def test_a_read_only_redis_counts_as_away(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        client.replicaof("127.0.0.1", "1")
        keeping.report(8, 1)
        await keeping.store.flush()
        assert not keeping.is_redis_up()
        client.replicaof("no", "one")
    await keeping.store.flush()
    assert keeping.is_redis_up()
    assert await keeping.is_copied()


async def test_keys_of_another_kind_are_replaced(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        client.set(PLACEMENTS_KEY, "something else")
    keeping.report(8, 1)
    await keeping.store.flush()
    await keeping.store.flush()
    assert await keeping.is_copied()


async def test_unreadable_records_are_skipped(keeping: Keeping, redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.hset(INSTANCES_KEY, "2", b"\xff\xff")
        client.hset(INSTANCES_KEY, "3", b"")
        client.hset(PLACEMENTS_KEY, "9:1", b"\xff\xff")
    assert await keeping.is_copied()


async def test_a_flood_of_changes_is_written_as_a_whole(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        client.hset(PLACEMENTS_KEY, "left over", b"")
    rows = [make_row(req_id, 1, 1) for req_id in range(1, MAX_DIRTY_KEYS + 2)]
    heartbeat = make_heartbeat(1, keeping.sequence_number + 1, *rows)
    keeping.store.record(keeping.placement_map.apply_heartbeat(heartbeat, 0.0).delta)
    await keeping.store.flush()
    assert redis_server.num_records() == (1, len(rows))
    assert await keeping.is_copied()
