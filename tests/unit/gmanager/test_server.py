"""The GManager service over real gRPC on loopback, with a clock that only the test moves."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc, types_pb2
from services.common.errors import ConfigError, InvalidRequest, NotLeader, Unavailable
from services.common.health import HealthReporter
from services.common.ids import InstId, ReqId, Term
from services.common.rpc import error_from_rpc, new_server, open_channel
from services.gmanager import convert
from services.gmanager.audit import Answer, DecisionLog
from services.gmanager.board import Rules
from services.gmanager.cluster import Cluster, InstanceLoad
from services.gmanager.config import GManagerConfig
from services.gmanager.election import Election
from services.gmanager.keeper import MapKeeper
from services.gmanager.leadership import Claim, Leadership
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import Delta, PlacementMap
from services.gmanager.policy import Decision, Verdict, plan
from services.gmanager.server import SERVICE_NAME, GManagerServicer, listen
from tests.unit.gmanager.builders import make_info, make_instance, make_row, view_of

DEADLINE_S = 5.0


@dataclass
class Running:
    channel: grpc.aio.Channel
    keeper: MapKeeper
    registry: CollectorRegistry
    deltas: list[Delta]
    decisions: DecisionLog
    now_s: float = 0.0
    stub: "gmanager_pb2_grpc.GManagerAsyncStub" = field(init=False)

    def __post_init__(self) -> None:
        self.stub = gmanager_pb2_grpc.GManagerStub(self.channel)

    async def register(self, inst_id: int, **changes: object) -> gmanager_pb2.RegisterResponse:
        info = convert.info_to_proto(make_info(inst_id, **changes))  # type: ignore[arg-type]
        request = gmanager_pb2.RegisterRequest(info=info)
        return await self.stub.Register(request, timeout=DEADLINE_S)

    async def heartbeat(
        self, inst_id: int, sequence_number: int, *entries: types_pb2.RequestPlacementEntry,
        full: bool = True, load: types_pb2.InstanceLoad | None = None, incarnation: int = 1,
    ) -> gmanager_pb2.HeartbeatResponse:  # fmt: skip
        request = gmanager_pb2.HeartbeatRequest(
            inst_id=inst_id,
            incarnation=incarnation,
            sequence_number=sequence_number,
            full=full,
            entries=entries,
            load=load,
        )
        return await self.stub.Heartbeat(request, timeout=DEADLINE_S)

    async def view(self) -> gmanager_pb2.GetClusterViewResponse:
        request = gmanager_pb2.GetClusterViewRequest()
        return await self.stub.GetClusterView(request, timeout=DEADLINE_S)

    async def creditors_of(self, inst_id: int) -> list[int]:
        request = gmanager_pb2.FindCreditorsRequest(inst_id=inst_id, req_id=7, num_blocks=3)
        response = await self.stub.FindCreditors(request, timeout=DEADLINE_S)
        return [view.info.inst_id for view in response.creditors]


@asynccontextmanager
async def running(
    config: GManagerConfig, leadership: Leadership | None = None, rebuild_s: float = 0.0
) -> AsyncIterator[Running]:
    registry, deltas = CollectorRegistry(), list[Delta]()
    keeper = MapKeeper(PlacementMap(), deltas.append, lambda: started.now_s, rebuild_s)
    metrics = GManagerMetrics(registry)

    async def load_nothing(now_s: float) -> Cluster:
        return Cluster()

    leadership = leadership or Leadership.sole(Term(3))
    election = Election(leadership, keeper, load_nothing, metrics, None)
    decisions = DecisionLog()
    decisions.moves_issued = 42
    servicer = GManagerServicer(config, keeper, metrics, decisions, election)
    server = new_server()
    gmanager_pb2_grpc.add_GManagerServicer_to_server(servicer, server)
    health = HealthReporter(server, [SERVICE_NAME])
    port = listen(server, "127.0.0.1:0")
    await server.start()
    await health.serving()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        started = Running(channel, keeper, registry, deltas, decisions)
        await election.step()
        yield started
    await server.stop(None)


@pytest.fixture
async def gmanager() -> AsyncIterator[Running]:
    async with running(GManagerConfig()) as started:
        yield started


def entry(req_id: int, inst_id: int, num_blocks: int) -> types_pb2.RequestPlacementEntry:
    return types_pb2.RequestPlacementEntry(
        req_id=req_id, inst_id=inst_id, num_blocks=num_blocks, local=True, owner_inst_id=inst_id
    )


def load(free_blocks: int, *, draining: bool = False) -> types_pb2.InstanceLoad:
    return types_pb2.InstanceLoad(free_blocks=free_blocks, draining=draining)


async def error_of(call: Awaitable[object]) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_registration_tells_the_heartbeat_period(gmanager: Running) -> None:
    assert (await gmanager.register(1)).heartbeat_period_s == 0.5


async def test_what_workers_report_is_what_the_view_shows(gmanager: Running) -> None:
    await gmanager.register(1)
    await gmanager.heartbeat(1, 1, entry(7, 1, 3), load=load(97))
    gmanager.now_s = 1.5
    view = await gmanager.view()
    (instance,) = view.instances
    assert instance.info == convert.info_to_proto(make_info(1))
    assert (instance.load.free_blocks, instance.age_s) == (97, 1.5)
    assert list(view.entries) == [entry(7, 1, 3)]
    assert (view.moves_issued, view.term) == (42, 3)


async def test_decisions_are_told_with_the_terms_of_the_model(gmanager: Running) -> None:
    busy = InstanceLoad(running=2, waiting=6, waiting_blocks=60, running_tokens=1600)
    instances = (make_instance(1, busy), make_instance(2))
    cluster = Cluster(instances, (make_row(7, 1, 80),))
    (decision,) = plan(view_of(cluster), Rules(batch_threshold=8, utilisation_threshold=0.8))
    gmanager.decisions.note(decision, now_s=1.0)
    gmanager.decisions.note_answer(decision.moves[0], Answer("refused", "full"))
    gmanager.now_s = 3.5
    request = gmanager_pb2.GetDecisionsRequest(req_id=7, inst_id=2)
    answer = await gmanager.stub.GetDecisions(request, timeout=DEADLINE_S)
    (told,) = answer.decisions
    assert (told.debtor, told.is_move, told.req_id, told.times) == (1, True, 7, 1)
    assert (told.first_age_s, told.last_age_s) == (2.5, 2.5)
    (move,) = told.moves
    assert (move.destination, move.num_blocks, move.outcome, move.reason) == (
        2,
        60,
        "refused",
        "full",
    )
    debtor, creditor = told.changes
    assert (debtor.inst_id, debtor.before.batch, debtor.after.batch) == (1, 2, 8)
    assert debtor.before.attention_s == pytest.approx(0.0016)
    assert creditor.after.attention_s == pytest.approx(60 * 16e-6)
    gain = sum(change.after.tokens_per_s - change.before.tokens_per_s for change in told.changes)
    assert told.gain_tokens_per_s == pytest.approx(gain)


@pytest.mark.parametrize("about", [{"req_id": 8}, {"inst_id": 3}])
async def test_decisions_about_others_are_not_told(
    gmanager: Running, about: dict[str, int]
) -> None:
    gmanager.decisions.note(Decision(InstId(1), Verdict.NO_CREDITOR, ReqId(7)), now_s=0.0)
    everything = gmanager_pb2.GetDecisionsRequest()
    assert len((await gmanager.stub.GetDecisions(everything, timeout=5)).decisions) == 1
    request = gmanager_pb2.GetDecisionsRequest(**about)
    assert not (await gmanager.stub.GetDecisions(request, timeout=5)).decisions


async def test_who_asks_for_instances_alone_gets_neither_rows_nor_the_model(
    gmanager: Running,
) -> None:
    await gmanager.register(1)
    await gmanager.heartbeat(1, 1, convert.entry_to_proto(make_row(7, 1, 3)))
    request = gmanager_pb2.GetClusterViewRequest(instances_only=True)
    view = await gmanager.stub.GetClusterView(request, timeout=DEADLINE_S)
    assert [len(view.instances), len(view.entries)] == [1, 0]
    assert not view.instances[0].info.HasField("perf")
    assert len((await gmanager.view()).entries) == 1


async def test_a_heartbeat_answers_with_the_peers(gmanager: Running) -> None:
    await gmanager.register(1)
    await gmanager.register(2)
    response = await gmanager.heartbeat(1, 1)
    assert [peer.info.inst_id for peer in response.peers] == [2]
    assert not response.register_again
    assert not response.full_report
    assert response.term == 3


async def test_a_gap_and_an_unknown_incarnation_are_answered(gmanager: Running) -> None:
    assert (await gmanager.heartbeat(1, 1)).register_again
    await gmanager.register(1)
    await gmanager.heartbeat(1, 1)
    assert (await gmanager.heartbeat(1, 3, full=False)).full_report
    assert (await gmanager.heartbeat(1, 4, incarnation=9)).register_again


async def test_silent_instances_leave_the_view(gmanager: Running) -> None:
    await gmanager.register(1)
    gmanager.now_s = 2.0
    await gmanager.register(2)
    gmanager.now_s = 4.0
    gmanager.keeper.expire(3.0)
    assert [view.info.inst_id for view in (await gmanager.view()).instances] == [2]


async def test_leaving_takes_effect_at_once(gmanager: Running) -> None:
    await gmanager.register(1)
    request = gmanager_pb2.DeregisterRequest(inst_id=1, incarnation=1)
    await gmanager.stub.Deregister(request, timeout=DEADLINE_S)
    await gmanager.stub.Deregister(request, timeout=DEADLINE_S)
    assert not (await gmanager.view()).instances


async def test_a_map_that_began_empty_is_shown_once_all_had_time_to_report() -> None:
    async with running(GManagerConfig(), rebuild_s=1.0) as gmanager:
        await gmanager.register(1)
        error = await error_of(gmanager.view())
        assert isinstance(error, Unavailable)
        assert "rebuilt" in error.message
        gmanager.now_s = 1.0
        assert len((await gmanager.view()).instances) == 1


async def test_a_follower_refuses_every_call_and_names_the_leader() -> None:
    leadership = Leadership(4.0)
    leadership.on_claim(Claim(False, "10.0.0.9:7000", Term(8), 4.0), 0.0, 0.0)
    async with running(GManagerConfig(), leadership) as gmanager:
        leaving = gmanager_pb2.DeregisterRequest(inst_id=1, incarnation=1)
        calls: list[Awaitable[object]] = [
            gmanager.register(1),
            gmanager.heartbeat(1, 1),
            gmanager.stub.Deregister(leaving, timeout=DEADLINE_S),
            gmanager.creditors_of(1),
            gmanager.view(),
        ]
        for call in calls:
            error = await error_of(call)
            assert isinstance(error, NotLeader)
            assert "10.0.0.9:7000" in error.message


async def test_a_stand_in_keeps_the_map_in_no_term() -> None:
    async with running(GManagerConfig(), Leadership(4.0)) as gmanager:
        await gmanager.register(1)
        assert (await gmanager.heartbeat(1, 1)).term == 0
        assert len((await gmanager.view()).instances) == 1


async def test_a_stand_in_to_whom_nobody_reports_sends_the_router_elsewhere() -> None:
    async with running(GManagerConfig(), Leadership(4.0)) as gmanager:
        assert isinstance(await error_of(gmanager.view()), Unavailable)
        await gmanager.register(1)
        assert len((await gmanager.view()).instances) == 1


async def test_every_change_is_handed_on(gmanager: Running) -> None:
    await gmanager.register(1)
    await gmanager.heartbeat(1, 1, entry(7, 1, 3))
    gmanager.now_s = 9.0
    gmanager.keeper.expire(3.0)
    keys = [(sorted(delta.instances), sorted(delta.rows)) for delta in gmanager.deltas]
    assert keys == [([1], []), ([], [(7, 1)]), ([1], [(7, 1)])]


async def test_creditors_are_named_same_host_first_then_most_free(gmanager: Running) -> None:
    hosts = {1: "10.0.0.1", 2: "10.0.0.2", 3: "10.0.0.1", 4: "10.0.0.2", 5: "10.0.0.1"}
    free = {1: 50, 2: 90, 3: 10, 4: 95, 5: 20}
    for inst_id, host in hosts.items():
        await gmanager.register(inst_id, host=host)
        await gmanager.heartbeat(inst_id, 1, load=load(free[inst_id]))
    assert await gmanager.creditors_of(1) == [5, 3, 4, 2]


async def test_who_is_no_creditor(gmanager: Running) -> None:
    for inst_id in (1, 2, 3):
        await gmanager.register(inst_id)
    await gmanager.register(4, model="other")
    await gmanager.heartbeat(2, 1, load=load(50, draining=True))
    await gmanager.heartbeat(3, 1, load=load(0))
    await gmanager.heartbeat(4, 1, load=load(50))
    assert await gmanager.creditors_of(1) == []


async def test_without_pooling_there_are_no_creditors() -> None:
    async with running(GManagerConfig(pooling=False)) as gmanager:
        for inst_id in (1, 2):
            await gmanager.register(inst_id)
            await gmanager.heartbeat(inst_id, 1, load=load(50))
        assert await gmanager.creditors_of(1) == []


async def test_an_unknown_debtor_may_ask_again(gmanager: Running) -> None:
    assert isinstance(await error_of(gmanager.creditors_of(1)), Unavailable)


async def test_bad_input_is_refused_and_the_next_call_works(gmanager: Running) -> None:
    error = await error_of(gmanager.register(1, incarnation=0))
    assert isinstance(error, InvalidRequest)
    assert error.param == "info.incarnation"
    await gmanager.register(1)
    error = await error_of(gmanager.heartbeat(1, 1, entry(7, 2, 3)))
    assert isinstance(error, InvalidRequest)
    assert not (await gmanager.heartbeat(1, 1, entry(7, 1, 3))).register_again


async def test_heartbeats_are_counted(gmanager: Running) -> None:
    await gmanager.register(1)
    await gmanager.heartbeat(1, 1)
    await gmanager.heartbeat(1, 2)
    assert gmanager.registry.get_sample_value("infinite_llm_gmanager_heartbeats_total") == 2


async def test_health_answers_for_the_service(gmanager: Running) -> None:
    stub = health_pb2_grpc.HealthStub(gmanager.channel)
    request = health_pb2.HealthCheckRequest(service="infinite_llm.v1.GManager")
    response = await stub.Check(request, timeout=DEADLINE_S)
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_in_use_names_the_variable() -> None:
    first, second = new_server(), new_server()
    port = listen(first, "127.0.0.1:0")
    await first.start()
    with pytest.raises(ConfigError, match="INFINITE_LLM_LISTEN_ADDRESS"):
        listen(second, f"127.0.0.1:{port}")
    await first.stop(None)
    await second.stop(None)
