"""Which of several gManagers is asked, over real gRPC on loopback."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc
from services.common.addresses import free_ports
from services.common.errors import InvalidRequest, NotLeader
from services.common.gmanagers import GManagers
from services.common.rpc import error_from_rpc, new_server

DEADLINE_S = 0.5


@dataclass
class Scripted(gmanager_pb2_grpc.GManagerServicer):
    """Answers with its number, fails as told, or hangs."""

    number: int
    error: Exception | None = None
    hangs: bool = False
    num_calls: int = 0
    address: str = field(default="", init=False)

    async def GetClusterView(
        self, request: gmanager_pb2.GetClusterViewRequest, context: object
    ) -> gmanager_pb2.GetClusterViewResponse:
        self.num_calls += 1
        while self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return gmanager_pb2.GetClusterViewResponse(moves_issued=self.number)


@asynccontextmanager
async def running(*scripted: Scripted) -> AsyncIterator[GManagers]:
    async with AsyncExitStack() as stack:
        for one in scripted:
            server = new_server()
            gmanager_pb2_grpc.add_GManagerServicer_to_server(one, server)
            one.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
        async with closing([one.address for one in scripted]) as gmanagers:
            yield gmanagers


@asynccontextmanager
async def closing(addresses: Sequence[str]) -> AsyncIterator[GManagers]:
    gmanagers = GManagers(addresses)
    yield gmanagers
    await gmanagers.close()


async def ask(gmanagers: GManagers) -> int:
    request = gmanager_pb2.GetClusterViewRequest()
    view = await gmanagers.ask(lambda g: g.GetClusterView(request, timeout=DEADLINE_S))
    return view.moves_issued


@pytest.fixture
def leader() -> Scripted:
    return Scripted(1)  # type: ignore[abstract]


@pytest.fixture
def follower() -> Scripted:
    return Scripted(2, NotLeader("1 leads"))  # type: ignore[abstract]


async def test_who_does_not_lead_is_asked_once(leader: Scripted, follower: Scripted) -> None:
    async with running(follower, leader) as gmanagers:
        assert [await ask(gmanagers) for _ in range(3)] == [1, 1, 1]
    assert (follower.num_calls, leader.num_calls) == (1, 3)


async def test_a_change_of_leader_is_followed(leader: Scripted, follower: Scripted) -> None:
    async with running(leader, follower) as gmanagers:
        assert await ask(gmanagers) == 1
        leader.error, follower.error = NotLeader("2 leads"), None
        assert await ask(gmanagers) == 2


async def test_one_that_is_gone_or_stuck_is_passed_over(leader: Scripted) -> None:
    stuck = Scripted(3, hangs=True)  # type: ignore[abstract]
    (port,) = free_ports(1)
    async with (
        running(stuck, leader),
        closing([f"127.0.0.1:{port}", stuck.address, leader.address]) as gmanagers,
    ):
        assert await ask(gmanagers) == 1


async def test_where_nobody_leads_the_caller_hears_it(follower: Scripted) -> None:
    other = Scripted(3, NotLeader("1 leads"))  # type: ignore[abstract]
    async with running(follower, other) as gmanagers:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(gmanagers)
        assert isinstance(error_from_rpc(caught.value), NotLeader)
        other.error = None
        assert await ask(gmanagers) == 3


async def test_an_error_of_the_callers_is_not_asked_again(
    leader: Scripted, follower: Scripted
) -> None:
    leader.error = InvalidRequest("bad")
    async with running(leader, follower) as gmanagers:
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(gmanagers)
    assert follower.num_calls == 0


async def test_calls_that_fail_together_pass_over_nobody(
    leader: Scripted, follower: Scripted
) -> None:
    async with running(follower, leader) as gmanagers:
        assert await asyncio.gather(*(ask(gmanagers) for _ in range(4))) == [1] * 4
