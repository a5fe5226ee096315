"""Keeps a copy of the placement map in Redis, for a warm restart of the gManager.

Redis is never on the request path: `record` only notes keys, and one background task, owned by
`__main__`, writes what they hold by then. While Redis is away the keys are forgotten, and once it
is back the whole map is written. Only the leader writes.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Collection
from secrets import token_hex
from typing import cast

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import WatchError

from protos.infinite_llm.v1 import types_pb2
from services.common.errors import InvalidRequest
from services.common.ids import InstId, Term
from services.gmanager import convert
from services.gmanager.cluster import Cluster, Instance, PlacementEntry
from services.gmanager.placement_map import Delta, PlacementMap
from services.gmanager.redis_connection import REDIS_DEADLINE_S, REDIS_ERRORS, RedisState

INSTANCES_KEY = "infinite_llm:instances"
PLACEMENTS_KEY = "infinite_llm:placements"
#: Names the process whose copy Redis holds, behind its term. Another name, or none after a restart
#: of Redis with empty hands, means that deltas would land on somebody else's map; a higher term,
#: that the map here is no longer the cluster's, whatever this process believes.
WRITER_KEY = "infinite_llm:writer"

#: Changes wait so long for company, and an outage so long for the next try.
FLUSH_PERIOD_S = 0.2
RETRY_PERIOD_S = 0.5
#: Where nothing changes, Redis is asked so often whether it still holds our copy.
CHECK_PERIOD_S = 0.5
FIELDS_PER_COMMAND = 5_000

_log = logging.getLogger(__name__)


class Store:
    def __init__(
        self,
        redis: Redis,
        placement_map: PlacementMap,
        state: RedisState,
        term: Callable[[], Term],
    ) -> None:
        """`term`: in which this process leads; 0 while it does not."""
        self._redis = redis
        self._map = placement_map
        self._state = state
        self._term = term
        self._name = token_hex(8)
        self._wake = asyncio.Event()
        self._instances: set[InstId] = set()
        #: Whose rows are to be written: all of an instance make one record.
        self._holders: set[InstId] = set()
        self._needs_snapshot = True

    def record(self, delta: Delta) -> None:
        """Notes what changed; never blocks, never fails."""
        if not (delta.instances or delta.rows):
            return
        if not self._needs_snapshot:
            self._instances |= delta.instances
            self._holders.update(key.inst_id for key in delta.rows)
        self._wake.set()

    async def load(self, now_s: float) -> Cluster:
        """What the last process left; nothing where Redis is away. Bad records are skipped."""
        try:
            async with asyncio.timeout(REDIS_DEADLINE_S):
                views, rows = [await self._values(key) for key in (INSTANCES_KEY, PLACEMENTS_KEY)]
        except REDIS_ERRORS as error:
            self._state.failed(error)
            return Cluster()
        instances = (_decode_instance(view, now_s) for view in views)
        entries = itertools.chain.from_iterable(map(_decode_rows, rows))
        return Cluster(tuple(filter(None, instances)), tuple(entries))

    async def run(self) -> None:
        """Writes until cancelled; no error ends it, since serving must not depend on it."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_PERIOD_S):
                    await self._wake.wait()
            try:
                await self.flush()
            except Exception as error:
                self._state.failed(error)
                _log.exception("writing the map failed")
            await asyncio.sleep(RETRY_PERIOD_S if self._state.trouble else FLUSH_PERIOD_S)

    async def flush(self) -> None:
        """Writes what is due; what fails or is cut off leaves the whole map due."""
        term = self._term()
        if not term:
            return
        self._wake.clear()
        is_written = False
        try:
            async with asyncio.timeout(2 * REDIS_DEADLINE_S):
                is_written = await self._write(term)
            self._state.worked()
        except REDIS_ERRORS as error:
            self._state.failed(error)
        finally:
            if not is_written:
                self._forget_deltas()
                self._wake.set()

    async def write_rest(self) -> None:
        """At the end: what is due still, as far as Redis takes it."""
        if self._wake.is_set():
            await self.flush()

    async def _values(self, key: str) -> list[bytes]:
        # Bytes, since the client was not told to decode.
        return cast(list[bytes], await self._redis.hvals(key))

    async def _write(self, term: Term) -> bool:
        """False where another process has led since, even between the look and the writing."""
        me = f"{term}:{self._name}".encode()
        async with self._redis.pipeline(transaction=True) as pipeline:
            await pipeline.watch(WRITER_KEY)
            # The cheapest way to learn that Redis is away, too.
            writer = cast(bytes | None, await pipeline.get(WRITER_KEY)) or b""
            if _term_of(writer) > term:
                return False
            if writer != me:
                self._forget_deltas()
            pipeline.multi()  # type: ignore[no-untyped-call]
            self._queue(pipeline, me)
            try:
                await pipeline.execute()
            except WatchError:
                return False
        return True

    def _queue(self, pipeline: Pipeline, me: bytes) -> None:
        # What changes during the write is recorded anew, and due at the next one.
        is_snapshot, self._needs_snapshot = self._needs_snapshot, False
        instances, self._instances = self._instances, set()
        holders, self._holders = self._holders, set()
        if is_snapshot:
            instances = {instance.inst_id for instance in self._map.instances()}
            holders = instances
            pipeline.delete(INSTANCES_KEY, PLACEMENTS_KEY)
            pipeline.set(WRITER_KEY, me)
        views = ((str(i), _instance_record(self._map.instance(i))) for i in instances)
        _put(pipeline, INSTANCES_KEY, dict(views))
        rows = ((str(i), _rows_record(i, self._map.rows_of(i))) for i in holders)
        _put(pipeline, PLACEMENTS_KEY, dict(rows))

    def _forget_deltas(self) -> None:
        self._needs_snapshot = True
        self._instances.clear()
        self._holders.clear()


def _term_of(writer: bytes) -> int:
    """0 where the name is no writer's."""
    term, _, _ = writer.partition(b":")
    return int(term) if term.isdigit() else 0


def _put(pipeline: Pipeline, key: str, records: dict[str, bytes | None]) -> None:
    """Many fields in one command: a command for each would cost the client ten times as much."""
    kept = [(field, record) for field, record in records.items() if record is not None]
    gone = [field for field, record in records.items() if record is None]
    for at in range(0, len(kept), FIELDS_PER_COMMAND):
        pipeline.hset(key, mapping=dict(kept[at : at + FIELDS_PER_COMMAND]))
    for at in range(0, len(gone), FIELDS_PER_COMMAND):
        pipeline.hdel(key, *gone[at : at + FIELDS_PER_COMMAND])


def _instance_record(instance: Instance | None) -> bytes | None:
    if instance is None:
        return None
    # Its age would be stale at once; the next process counts from its own start.
    view = convert.view_to_proto(instance, now_s=instance.last_heartbeat_s)
    return view.SerializeToString()


def _rows_record(inst_id: InstId, rows: Collection[PlacementEntry]) -> bytes | None:
    return convert.rows_to_proto(inst_id, rows).SerializeToString() if rows else None


def _decode_instance(record: bytes, now_s: float) -> Instance | None:
    try:
        return convert.view_from_proto(types_pb2.InstanceView.FromString(record), now_s)
    except (DecodeError, InvalidRequest) as error:
        _log.warning("unreadable instance record skipped", extra={"error": str(error)})
        return None


def _decode_rows(record: bytes) -> list[PlacementEntry]:
    try:
        return convert.rows_from_proto(types_pb2.InstanceRows.FromString(record))
    except (DecodeError, ValueError) as error:
        _log.warning("unreadable placement record skipped", extra={"error": str(error)})
        return []
