"""The GManager service on the wire. Translates, asks `keeper`, translates back.

Called by workers (register, heartbeat, creditors), the router (the cluster view) and people (the
decisions of the planner).
"""

from typing import Any, TypeAlias

import grpc

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc
from services.common.errors import ConfigError, Unavailable
from services.common.ids import Incarnation, InstId, ReqId
from services.gmanager import convert
from services.gmanager.audit import DecisionLog
from services.gmanager.cluster import Instance
from services.gmanager.config import GManagerConfig
from services.gmanager.convert_decisions import decision_to_proto
from services.gmanager.creditors import rank_creditors
from services.gmanager.election import Election
from services.gmanager.keeper import MapKeeper
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.peer_views import MAX_PEERS, PeerDirectory

SERVICE_NAME = gmanager_pb2.DESCRIPTOR.services_by_name["GManager"].full_name
#: Calls under way may end within this long after the stop signal.
STOP_GRACE_S = 1.0
#: For those who do not say how many they want.
DEFAULT_NUM_DECISIONS = 100

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class GManagerServicer(gmanager_pb2_grpc.GManagerServicer):
    def __init__(
        self,
        config: GManagerConfig,
        keeper: MapKeeper,
        metrics: GManagerMetrics,
        decisions: DecisionLog,
        election: Election,
    ) -> None:
        self._config = config
        self._keeper = keeper
        self._metrics = metrics
        self._decisions = decisions
        self._election = election
        self._peers = PeerDirectory(keeper.instances)

    async def Register(
        self, request: gmanager_pb2.RegisterRequest, context: Context
    ) -> gmanager_pb2.RegisterResponse:
        self._election.check_leads()
        self._keeper.register(convert.info_from_proto(request.info))
        return gmanager_pb2.RegisterResponse(heartbeat_period_s=self._config.heartbeat_period_s)

    async def Heartbeat(
        self, request: gmanager_pb2.HeartbeatRequest, context: Context
    ) -> gmanager_pb2.HeartbeatResponse:
        self._election.check_leads()
        heartbeat = convert.heartbeat_from_proto(request)
        outcome = self._keeper.apply_heartbeat(heartbeat)
        self._metrics.heartbeats.inc()
        response = gmanager_pb2.HeartbeatResponse(
            register_again=outcome.register_again,
            full_report=outcome.full_report,
            term=self._election.term,
        )
        caller = self._keeper.instance(heartbeat.inst_id)
        if caller is not None:
            peers = self._peers.peers_of(caller)
            response.peers.extend(peers.views)
            response.unlisted_peers = peers.num_unlisted
            response.unlisted_blocks = peers.unlisted_blocks
        return response

    async def Deregister(
        self, request: gmanager_pb2.DeregisterRequest, context: Context
    ) -> gmanager_pb2.DeregisterResponse:
        self._election.check_leads()
        self._keeper.deregister(InstId(request.inst_id), Incarnation(request.incarnation))
        return gmanager_pb2.DeregisterResponse()

    async def FindCreditors(
        self, request: gmanager_pb2.FindCreditorsRequest, context: Context
    ) -> gmanager_pb2.FindCreditorsResponse:
        self._election.check_leads()
        creditors = self._creditors_of(InstId(request.inst_id))
        return gmanager_pb2.FindCreditorsResponse(creditors=map(convert.peer_to_proto, creditors))

    async def GetClusterView(
        self, request: gmanager_pb2.GetClusterViewRequest, context: Context
    ) -> gmanager_pb2.GetClusterViewResponse:
        self._election.check_leads()
        if self._keeper.whole_in_s > 0:
            raise Unavailable("the map is being rebuilt")
        if not (self._keeper.instances() or self._election.is_leader):
            # Instances that report to another stand-in are seen there.
            raise Unavailable("no instance reports here")
        now_s, is_all = self._keeper.clock(), not request.instances_only
        entries = self._keeper.cluster().entries if is_all else ()
        return gmanager_pb2.GetClusterViewResponse(
            instances=[
                convert.view_to_proto(instance, now_s, with_perf=is_all)
                for instance in self._keeper.instances()
            ],
            entries=map(convert.entry_to_proto, entries),
            moves_issued=self._decisions.moves_issued,
            term=self._election.term,
        )

    async def GetDecisions(
        self, request: gmanager_pb2.GetDecisionsRequest, context: Context
    ) -> gmanager_pb2.GetDecisionsResponse:
        self._election.check_leads()
        records = self._decisions.find(
            ReqId(request.req_id) if request.HasField("req_id") else None,
            InstId(request.inst_id) if request.HasField("inst_id") else None,
            request.limit or DEFAULT_NUM_DECISIONS,
        )
        now_s = self._keeper.clock()
        return gmanager_pb2.GetDecisionsResponse(
            decisions=[decision_to_proto(record, now_s) for record in records]
        )

    def _creditors_of(self, inst_id: InstId) -> list[Instance]:
        debtor = self._keeper.instance(inst_id)
        if debtor is None:
            raise Unavailable(f"instance {inst_id} is not registered here yet")
        if not self._config.pooling:
            return []
        return rank_creditors(self._keeper.instances(), debtor)[:MAX_PEERS]


def listen(server: grpc.aio.Server, address: str) -> int:
    """Binds the port and returns it (the system chooses for `host:0`)."""
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"INFINITE_LLM_LISTEN_ADDRESS: cannot listen on {address}") from error
