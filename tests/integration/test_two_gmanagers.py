"""Two gManagers on one Redis: one leads, the other takes over, and never do both order moves.

Real processes; a worker is either played through the client that workers use, or a real rManager.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protos.infinite_llm.v1 import gmanager_pb2, types_pb2, worker_pb2
from services.common.errors import InfiniteLLMError
from services.common.gmanagers import GManagers
from services.common.rpc import error_from_rpc
from services.gmanager import convert
from services.worker.rmanager.rmanager import RManager
from tests.integration.gmanager_process import PROMPT_S, GManagerProcess
from tests.integration.redis_server import START_DEADLINE_S, RedisServer
from tests.unit.gmanager.builders import make_info, make_row
from tests.unit.gmanager.fake_rmanager import FakeRManager, serving
from tests.unit.worker.rmanager.rig import Instance

pytestmark = pytest.mark.integration

LEASE_S = 2.0
HEARTBEAT_S = 0.2
#: A call that is under way, and the scheduling of a busy machine.
SLACK_S = 1.0
HELD_DOWN = types_pb2.InstanceLoad(running=2, waiting=6, waiting_blocks=60, running_tokens=1600)
IDLE = types_pb2.InstanceLoad(free_blocks=100)


@pytest.fixture
def gmanagers(redis_server: RedisServer, tmp_path: Path) -> Iterator[list[GManagerProcess]]:
    settings = {
        "redis_url": redis_server.url,
        "leader_lease_s": LEASE_S,
        "heartbeat_period_s": HEARTBEAT_S,
        "planning_period_s": 0.1,
    }
    processes = [GManagerProcess(tmp_path / f"{number}.log", **settings) for number in range(2)]
    yield processes
    for process in processes:
        process.kill()


async def until(check: Callable[[], bool]) -> float:
    """How long it took."""
    start_s = time.monotonic()
    async with asyncio.timeout(START_DEADLINE_S):
        while not check():
            await asyncio.sleep(0.02)
    return time.monotonic() - start_s


async def elected(gmanagers: list[GManagerProcess]) -> tuple[GManagerProcess, GManagerProcess]:
    """Leader and follower, once both know."""
    await until(lambda: sorted(g.roles[-1:] for g in gmanagers) == [["follower"], ["leader"]])
    leader, follower = sorted(gmanagers, key=lambda g: g.roles[-1], reverse=True)
    return leader, follower


@dataclass
class PlayedWorker:
    """Registers and beats as a worker does, with one request of `num_blocks`."""

    clients: GManagers
    inst_id: int
    control_address: str = "127.0.0.1:1"
    load: types_pb2.InstanceLoad = field(default_factory=types_pb2.InstanceLoad)
    num_blocks: int = 0
    sequence_number: int = 0
    is_registered: bool = False
    terms: list[int] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            try:
                await self.beat()
            except InfiniteLLMError:
                self.is_registered = False
            await asyncio.sleep(HEARTBEAT_S)

    async def beat(self) -> None:
        try:
            if not self.is_registered:
                info = convert.info_to_proto(make_info(self.inst_id))
                info.control_address = self.control_address
                registration = gmanager_pb2.RegisterRequest(info=info)
                await self.clients.ask(lambda g: g.Register(registration, timeout=PROMPT_S))
                self.is_registered = True
            self.sequence_number += 1
            rows = [make_row(7, self.inst_id, self.num_blocks)] if self.num_blocks else []
            request = gmanager_pb2.HeartbeatRequest(
                inst_id=self.inst_id, incarnation=1, sequence_number=self.sequence_number,
                full=True, entries=map(convert.entry_to_proto, rows), load=self.load,
            )  # fmt: skip
            response = await self.clients.ask(lambda g: g.Heartbeat(request, timeout=PROMPT_S))
        except Exception as error:
            raise error_from_rpc(error) from error  # type: ignore[arg-type]
        self.is_registered = not response.register_again
        self.terms.append(response.term)


@asynccontextmanager
async def working(*workers: PlayedWorker) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def asking(gmanagers: list[GManagerProcess]) -> AsyncIterator[GManagers]:
    clients = GManagers([gmanager.address for gmanager in gmanagers])
    yield clients
    await clients.close()


async def rows(clients: GManagers) -> list[tuple[int, int]]:
    request = gmanager_pb2.GetClusterViewRequest()
    view = await clients.ask(lambda g: g.GetClusterView(request, timeout=PROMPT_S))
    return [(entry.inst_id, entry.num_blocks) for entry in view.entries]


async def test_a_killed_leader_is_replaced_within_two_leases(
    gmanagers: list[GManagerProcess],
) -> None:
    async with asking(gmanagers) as clients, asking(gmanagers) as reading:
        leader, follower = await elected(gmanagers)
        worker = PlayedWorker(clients, 1, num_blocks=3)
        async with working(worker):
            await until(lambda: len(worker.terms) > 3)
            assert await rows(reading) == [(1, 3)]
            before = max(worker.terms)
            leader.kill()
            took_s = await until(lambda: follower.roles[-1] == "leader")
            assert took_s < 2 * LEASE_S
            await until(lambda: worker.terms[-1] > before)
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert await rows(reading) == [(1, 3)]
        assert worker.terms == sorted(worker.terms)
        print(f"taken over after {took_s:.2f} s")


async def test_a_leader_that_stops_makes_room_at_once(gmanagers: list[GManagerProcess]) -> None:
    leader, follower = await elected(gmanagers)
    leader.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(leader.process.wait, START_DEADLINE_S) == 0
    assert await until(lambda: follower.roles[-1] == "leader") < LEASE_S / 4 + SLACK_S


async def test_the_plan_of_a_deposed_leader_is_refused_by_a_worker(
    gmanagers: list[GManagerProcess], tmp_path: Path
) -> None:
    """It was sent in time and is read late: the leader froze, and another leads meanwhile."""
    leader, follower = await elected(gmanagers)
    async with (
        Instance(1, tmp_path, 8, 1.0, follower.address) as source,
        asking([leader]) as clients,
    ):
        late = LateReader(source.rmanager)
        debtor = PlayedWorker(clients, 1, f"127.0.0.1:{source.port}", HELD_DOWN, 80)
        async with working(debtor, PlayedWorker(clients, 2, load=IDLE)):
            await asyncio.wait_for(late.arrived.wait(), START_DEADLINE_S)
            leader.freeze()
        await until(lambda: follower.roles[-1] == "leader")
        await asyncio.wait_for(source.rmanager.heartbeat.first_view.wait(), START_DEADLINE_S)
        late.may_read.set()
        leader.thaw()
        await until(lambda: bool(late.answers))
        await until(lambda: leader.roles[-1] == "follower")
        assert not late.answers[0].accepted
        assert "leads no more" in late.answers[0].reason
        assert late.answers[0].highest_term > debtor.terms[-1]


class LateReader:
    """Lets an rManager read its orders only when the test says so, whoever still waits by then."""

    def __init__(self, rmanager: RManager) -> None:
        self.arrived, self.may_read = asyncio.Event(), asyncio.Event()
        self.answers: list[worker_pb2.MoveKvCacheResponse] = []
        self._read = rmanager.move_kvcache
        self._tasks: set[asyncio.Task[worker_pb2.MoveKvCacheResponse]] = set()
        rmanager.move_kvcache = self._move_kvcache  # type: ignore[method-assign]

    async def _move_kvcache(
        self, request: worker_pb2.MoveKvCacheRequest
    ) -> worker_pb2.MoveKvCacheResponse:
        self.arrived.set()
        reading = asyncio.create_task(self._read_late(request))
        self._tasks.add(reading)
        return await asyncio.shield(reading)

    async def _read_late(
        self, request: worker_pb2.MoveKvCacheRequest
    ) -> worker_pb2.MoveKvCacheResponse:
        await self.may_read.wait()
        self.answers.append(await self._read(request))
        return self.answers[-1]


async def test_a_frozen_leader_orders_nothing_once_it_goes_on(
    gmanagers: list[GManagerProcess],
) -> None:
    leader, follower = await elected(gmanagers)
    leader.freeze()
    await until(lambda: follower.roles[-1] == "leader")
    source = FakeRManager(worker_pb2.MoveKvCacheResponse(accepted=True))
    async with asking([follower]) as clients, serving(source) as address:
        debtor = PlayedWorker(clients, 1, address, HELD_DOWN, 80)
        creditor = PlayedWorker(clients, 2, load=IDLE)
        async with working(debtor, creditor):
            leader.thaw()
            await until(lambda: bool(source.requests))
            await until(lambda: leader.roles[-1] == "follower")
    assert {request.term for request in source.requests} == {debtor.terms[-1]}


async def test_without_redis_nobody_plans_and_the_map_is_kept(
    gmanagers: list[GManagerProcess], redis_server: RedisServer
) -> None:
    leader, follower = await elected(gmanagers)
    async with asking(gmanagers) as clients, asking(gmanagers) as reading:
        worker = PlayedWorker(clients, 1, num_blocks=3)
        async with working(worker):
            await until(lambda: len(worker.terms) > 3)
            redis_server.kill()
            await until(lambda: [g.roles[-1] for g in (leader, follower)] == ["stand-in"] * 2)
            worker.num_blocks = 4
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert worker.terms[-1] == 0
            assert await rows(reading) == [(1, 4)]
            leader.kill()
            await asyncio.sleep(4 * HEARTBEAT_S)
            assert await rows(reading) == [(1, 4)]
            redis_server.start()
            await until(lambda: follower.roles[-1] == "leader")
            await asyncio.sleep(2 * HEARTBEAT_S)
            assert await rows(reading) == [(1, 4)]
        terms = [term for term in worker.terms if term]
        assert terms == sorted(terms)


async def test_terms_grow_even_where_redis_lost_everything(
    gmanagers: list[GManagerProcess], redis_server: RedisServer
) -> None:
    await elected(gmanagers)
    async with asking(gmanagers) as clients:
        worker = PlayedWorker(clients, 1)
        async with working(worker):
            await until(lambda: bool(worker.terms))
            first = worker.terms[0]
            redis_server.kill()
            redis_server.start()
            await until(lambda: worker.terms[-1] > first)


@pytest.mark.parametrize("trouble", ["read-only", "full"])
async def test_a_leader_and_a_redis_that_takes_no_writes(
    gmanagers: list[GManagerProcess], redis_server: RedisServer, trouble: str
) -> None:
    """A full one still renews the lease; with a read-only one planning rests until it is well."""
    leader, follower = await elected(gmanagers)
    with redis_server.client() as client:
        if trouble == "full":
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1")
            await asyncio.sleep(1.5 * LEASE_S)
            assert leader.roles == ["leader"]
            client.config_set("maxmemory", "0")
        else:
            client.replicaof("127.0.0.1", "1")
            await until(lambda: leader.roles[-1] == "stand-in")
            client.replicaof("no", "one")
            await until(lambda: "leader" in (leader.roles[-1], follower.roles[-1]))
    await elected(gmanagers)
