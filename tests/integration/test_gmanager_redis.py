"""The gManager's store beside a real Redis that is killed, frozen, slow, emptied or read-only, ...

Whenever Redis is well, it holds the whole map; whatever it does, it costs no more than a deadline.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from protos.infinite_llm.v1.types_pb2 import InstanceRows
from services.common.ids import Term
from services.gmanager.cluster import Cluster, InstanceLoad
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import PlacementMap
from services.gmanager.redis_connection import REDIS_DEADLINE_S, RedisState, connect
from services.gmanager.store import (
    INSTANCES_KEY,
    PLACEMENTS_KEY,
    WRITER_KEY,
    Store,
)
from tests.integration.proxy import certify, relaying, server_context, to_socket
from tests.integration.redis_server import RedisServer, eventually, running_redis
from tests.unit.gmanager.builders import make_heartbeat, make_info, make_row

pytestmark = pytest.mark.integration

TERM = Term(5)


@dataclass
class Keeping:
    """A map with one instance and one row, and its store."""

    url: str
    placement_map: PlacementMap = field(default_factory=PlacementMap)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    sequence_number: int = 0
    term: Term = TERM
    redis: Redis | None = None

    def __post_init__(self) -> None:
        self.redis = self.redis or connect(self.url)
        up = GManagerMetrics(self.registry).redis_up.labels("map")
        state = RedisState(up, "the map is kept in memory alone")
        self.store = Store(self.redis, self.placement_map, state, lambda: self.term)
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
        name, labels = "infinite_llm_gmanager_redis_up", {"use": "map"}
        return self.registry.get_sample_value(name, labels) == 1.0

    async def is_copied(self) -> bool:
        """Whether a process that starts now would find this very map."""
        restored = PlacementMap()
        restored.restore(await loaded(connect(self.url)), now_s=0.0)
        return essence(restored) == essence(self.placement_map)

    async def close(self) -> None:
        assert self.redis is not None
        await self.redis.aclose()


def essence(placement_map: PlacementMap) -> object:
    cluster = placement_map.cluster()
    return [(instance.info, instance.load) for instance in cluster.instances], cluster.entries


async def loaded(redis: Redis) -> Cluster:
    up = GManagerMetrics(CollectorRegistry()).redis_up.labels("map")
    store = Store(redis, PlacementMap(), RedisState(up, ""), lambda: TERM)
    try:
        return await store.load(now_s=0.0)
    finally:
        await redis.aclose()


@pytest.fixture
async def keeping(redis_server: RedisServer) -> AsyncIterator[Keeping]:
    keeping = Keeping(redis_server.url)
    await keeping.store.flush()
    yield keeping
    await keeping.close()


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


async def test_a_redis_that_lost_its_data_is_noticed_while_nothing_changes(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    writer = asyncio.create_task(keeping.store.run())
    with redis_server.client() as client:
        client.flushall()
    await eventually(lambda: redis_server.num_records() == (1, 1))
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
        assert await loaded(connect(redis_server.url)) == Cluster()
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


async def test_a_full_redis_counts_as_away(keeping: Keeping, redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        keeping.report(8, 1)
        await keeping.store.flush()
        assert not keeping.is_redis_up()
        client.config_set("maxmemory", "0")
    await keeping.store.flush()
    assert keeping.is_redis_up()
    assert await keeping.is_copied()


async def test_a_slow_redis_takes_the_map_and_one_that_is_too_slow_costs_a_deadline(
    redis_server: RedisServer,
) -> None:
    async with relaying(to_socket(redis_server.socket)) as relay:
        keeping = Keeping(redis_server.url, redis=connect(f"redis://{relay.address}"))
        relay.delay_s = REDIS_DEADLINE_S / 5
        await keeping.store.flush()
        assert keeping.is_redis_up()
        assert await keeping.is_copied()
        relay.delay_s = 10 * REDIS_DEADLINE_S
        keeping.report(8, 1)
        async with asyncio.timeout(3 * REDIS_DEADLINE_S):
            await keeping.store.flush()
        assert not keeping.is_redis_up()
        relay.delay_s = 0.0
        await keeping.store.flush()
        assert await keeping.is_copied()
        await keeping.close()


async def test_a_restart_with_data_loses_nothing(tmp_path: Path) -> None:
    with running_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        keeping = Keeping(server.url)
        await keeping.store.flush()
        server.kill()
        server.start()
        assert await keeping.is_copied()
        keeping.report(8, 1)
        await keeping.store.flush()  # meets the broken connection
        await keeping.store.flush()
        assert await keeping.is_copied()
        await keeping.close()


async def test_a_password_may_stand_in_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    with running_redis(tmp_path, password="secret") as server:
        for password, is_admitted in (("wrong", False), ("secret", True)):
            file.write_text(f"{password}\n")
            keeping = Keeping(server.url, redis=connect(server.url, password_file=file))
            await keeping.store.flush()
            assert keeping.is_redis_up() == is_admitted
            await keeping.close()
        assert server.num_records() == (1, 1)
    assert "redis refuses us" in caplog.text
    assert "secret" not in caplog.text


async def test_a_server_is_trusted_if_the_ca_file_vouches_for_it(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    ca, other = certify(tmp_path, "ca"), certify(tmp_path, "other")
    async with relaying(to_socket(redis_server.socket), server_context(ca)) as relay:
        for ca_file, is_trusted in ((other, False), (ca, True)):
            redis = connect(f"rediss://{relay.address}", ca_file=ca_file)
            keeping = Keeping(redis_server.url, redis=redis)
            await keeping.store.flush()
            assert keeping.is_redis_up() == is_trusted
            await keeping.close()
    assert redis_server.num_records() == (1, 1)


async def test_who_does_not_lead_writes_nothing(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    with redis_server.client() as client:
        client.flushall()
    keeping.term = Term(0)
    keeping.report(8, 1)
    await keeping.store.flush()
    await keeping.store.write_rest()
    assert redis_server.num_records() == (0, 0)
    keeping.term = TERM
    await keeping.store.write_rest()
    assert await keeping.is_copied()


async def test_a_deposed_leader_leaves_its_successors_copy_alone(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    """Frozen after it looked whether it leads, whether or not it had asked Redis who writes."""
    successor = Keeping(redis_server.url, term=Term(6))
    successor.report(9, 4)
    await successor.store.flush()
    keeping.report(8, 1)
    await keeping.store.flush()
    assert await successor.is_copied()
    await successor.close()


async def test_who_is_deposed_between_looking_and_writing_writes_nothing(
    keeping: Keeping, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = keeping.store._queue

    def queue_late(pipeline: Pipeline, me: bytes) -> None:
        with redis_server.client() as client:
            client.set(WRITER_KEY, "6:successor")
        queue(pipeline, me)

    monkeypatch.setattr(keeping.store, "_queue", queue_late)
    before = await loaded(connect(redis_server.url))
    keeping.report(8, 1)
    await keeping.store.flush()
    assert await loaded(connect(redis_server.url)) == before
    assert keeping.is_redis_up()


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
        client.hset(PLACEMENTS_KEY, "2", b"\xff\xff")
        client.hset(PLACEMENTS_KEY, "3", InstanceRows(req_ids=[7]).SerializeToString())
    assert await keeping.is_copied()


async def test_all_rows_of_an_instance_are_one_record(
    keeping: Keeping, redis_server: RedisServer
) -> None:
    rows = [make_row(req_id, 1, 1) for req_id in range(1, 1000)]
    heartbeat = make_heartbeat(1, keeping.sequence_number + 1, *rows)
    keeping.store.record(keeping.placement_map.apply_heartbeat(heartbeat, 0.0).delta)
    await keeping.store.flush()
    assert redis_server.num_records() == (1, 1)
    assert await keeping.is_copied()
