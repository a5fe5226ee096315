"""What a heartbeat carries, and how registration survives a gManager that comes and goes."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc, types_pb2
from services.common.addresses import free_ports
from services.common.ids import InstId, ReqId
from services.common.rpc import new_server
from services.worker.rmanager.clients import Clients
from services.worker.rmanager.fence import Fence
from services.worker.rmanager.heartbeat import Heartbeat, Holdings, PlacementReport
from services.worker.rmanager.peers import PeerView, Unlisted
from tests.unit.worker.rmanager.rig import eventually


def holding(**blocks: int) -> Holdings:
    """r1o2=3 means: 3 blocks of request 1, owned by instance 2."""
    keys = {name: tuple(int(x) for x in name[1:].split("o")) for name in blocks}
    return {(ReqId(keys[n][0]), InstId(keys[n][1])): count for n, count in blocks.items()}


def rows(entries: list[types_pb2.RequestPlacementEntry]) -> set[tuple[int, int, int, bool]]:
    return {(e.req_id, e.owner_inst_id, e.num_blocks, e.local) for e in entries}


def test_the_first_report_is_full_and_later_ones_carry_changes() -> None:
    report = PlacementReport(1)
    number, is_full, entries = report.next(holding(r1o1=3, r2o2=4))
    assert (number, is_full) == (1, True)
    assert rows(entries) == {(1, 1, 3, True), (2, 2, 4, False)}
    number, is_full, entries = report.next(holding(r1o1=5, r2o2=4))
    assert (number, is_full, rows(entries)) == (2, False, {(1, 1, 5, True)})
    assert report.next(holding(r1o1=5, r2o2=4))[2] == []


def test_what_is_gone_is_reported_as_zero_blocks() -> None:
    report = PlacementReport(1)
    report.next(holding(r1o1=3, r2o2=4))
    assert rows(report.next(holding(r1o1=3))[2]) == {(2, 2, 0, False)}


def test_a_full_report_names_only_what_is_held() -> None:
    report = PlacementReport(1)
    report.next(holding(r1o1=3))
    report.must_be_full = True
    number, is_full, entries = report.next(holding(r2o2=1))
    assert (number, is_full, rows(entries)) == (2, True, {(2, 2, 1, False)})


class ScriptedGManager(gmanager_pb2_grpc.GManagerServicer):
    def __init__(self) -> None:
        self.registered: list[int] = []
        self.heartbeats: list[gmanager_pb2.HeartbeatRequest] = []
        self.answer = gmanager_pb2.HeartbeatResponse()

    async def Register(
        self, request: gmanager_pb2.RegisterRequest, context: object
    ) -> gmanager_pb2.RegisterResponse:
        self.registered.append(request.info.inst_id)
        self.answer = gmanager_pb2.HeartbeatResponse()
        return gmanager_pb2.RegisterResponse(heartbeat_period_s=0.01)

    async def Heartbeat(
        self, request: gmanager_pb2.HeartbeatRequest, context: object
    ) -> gmanager_pb2.HeartbeatResponse:
        self.heartbeats.append(request)
        return self.answer


@pytest.fixture
async def gmanager() -> AsyncIterator[tuple[ScriptedGManager, str]]:
    scripted, server = ScriptedGManager(), new_server()  # type: ignore[abstract]
    gmanager_pb2_grpc.add_GManagerServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield scripted, f"127.0.0.1:{port}"
    await server.stop(None)


async def beating(
    address: str,
    on_view: Callable[[list[PeerView], Unlisted], None] = lambda views, unlisted: None,
    on_away: Callable[[], None] = lambda: None,
    fence: Fence | None = None,
) -> tuple[Heartbeat, asyncio.Task[None], Clients]:
    clients = Clients([address])
    info = types_pb2.InstanceInfo(inst_id=4, incarnation=9)
    heartbeat = Heartbeat(
        info,
        clients,
        lambda: (holding(r1o4=2), types_pb2.InstanceLoad(free_blocks=5)),
        on_view,
        on_away,
        fence or Fence(),
    )
    return heartbeat, asyncio.create_task(heartbeat.run()), clients


async def stop(task: asyncio.Task[None], clients: Clients) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await clients.close()


async def test_it_registers_then_beats_with_rising_numbers(
    gmanager: tuple[ScriptedGManager, str],
) -> None:
    scripted, address = gmanager
    _, task, clients = await beating(address)
    await eventually(lambda: len(scripted.heartbeats) >= 3)
    await stop(task, clients)
    assert scripted.registered == [4]
    assert [h.sequence_number for h in scripted.heartbeats[:3]] == [1, 2, 3]
    assert [h.full for h in scripted.heartbeats[:3]] == [True, False, False]
    assert scripted.heartbeats[0].load.free_blocks == 5


async def test_what_cannot_wait_is_told_at_once_and_the_next_beat_keeps_its_period(
    gmanager: tuple[ScriptedGManager, str],
) -> None:
    scripted, address = gmanager
    heartbeat, task, clients = await beating(address)
    await eventually(lambda: len(scripted.heartbeats) >= 1)
    heartbeat._period_s = 60.0
    for _ in range(3):
        seen = len(scripted.heartbeats)
        heartbeat.beat_now()
        await eventually(lambda: len(scripted.heartbeats) > seen)  # noqa: B023
    heartbeat.beat_now()
    await stop(task, clients)  # never lost, not even beside a beat that is due
    assert task.cancelled()


async def test_it_reports_fully_when_asked(gmanager: tuple[ScriptedGManager, str]) -> None:
    scripted, address = gmanager
    _, task, clients = await beating(address)
    await eventually(lambda: len(scripted.heartbeats) >= 2)
    scripted.answer = gmanager_pb2.HeartbeatResponse(full_report=True)
    seen = len(scripted.heartbeats)
    await eventually(lambda: any(h.full for h in scripted.heartbeats[seen:]))
    await stop(task, clients)


async def test_it_registers_again_when_it_is_unknown(
    gmanager: tuple[ScriptedGManager, str],
) -> None:
    scripted, address = gmanager
    _, task, clients = await beating(address)
    await eventually(lambda: len(scripted.heartbeats) >= 2)
    seen = len(scripted.heartbeats)
    scripted.answer = gmanager_pb2.HeartbeatResponse(register_again=True)
    await eventually(lambda: len(scripted.registered) == 2)
    await eventually(lambda: any(h.full for h in scripted.heartbeats[seen:]))
    await stop(task, clients)


async def test_the_view_of_peers_is_passed_on(gmanager: tuple[ScriptedGManager, str]) -> None:
    scripted, address = gmanager
    views: list[list[PeerView]] = []
    counts: list[Unlisted] = []

    def on_view(view: list[PeerView], unlisted: Unlisted) -> None:
        counts.append(unlisted)
        views.append(view)

    heartbeat, task, clients = await beating(address, on_view)
    await asyncio.wait_for(heartbeat.first_view.wait(), 5)
    info = types_pb2.InstanceInfo(inst_id=2, incarnation=3, control_address="h:1", num_blocks=7)
    peer = types_pb2.InstanceView(info=info, load=types_pb2.InstanceLoad(free_blocks=6))
    scripted.answer = gmanager_pb2.HeartbeatResponse(
        peers=[peer], unlisted_peers=3, unlisted_blocks=90
    )
    await eventually(lambda: bool(views[-1]))
    await stop(task, clients)
    assert (views[-1][0].inst_id, views[-1][0].free_blocks) == (2, 6)
    assert counts[-1] == (3, 90)


async def test_it_hears_who_leads_now(gmanager: tuple[ScriptedGManager, str]) -> None:
    scripted, address = gmanager
    fence = Fence()
    _, task, clients = await beating(address, fence=fence)
    await eventually(lambda: len(scripted.heartbeats) >= 1)
    scripted.answer = gmanager_pb2.HeartbeatResponse(term=5)
    await eventually(lambda: fence.highest_term == 5)
    scripted.answer = gmanager_pb2.HeartbeatResponse(term=0)
    seen = len(scripted.heartbeats)
    await eventually(lambda: len(scripted.heartbeats) > seen + 1)
    await stop(task, clients)
    assert fence.highest_term == 5


async def test_it_goes_on_while_the_gmanager_is_away() -> None:
    (port,) = free_ports(1)
    times_away: list[bool] = []
    _, task, clients = await beating(f"127.0.0.1:{port}", on_away=lambda: times_away.append(True))
    await asyncio.sleep(0.5)
    assert not task.done()
    assert len(times_away) == 1
    scripted, revived = ScriptedGManager(), new_server()  # type: ignore[abstract]
    gmanager_pb2_grpc.add_GManagerServicer_to_server(scripted, revived)
    assert revived.add_insecure_port(f"127.0.0.1:{port}") == port
    await revived.start()
    await eventually(lambda: bool(scripted.heartbeats))
    assert scripted.heartbeats[0].full
    await stop(task, clients)
    await revived.stop(None)
