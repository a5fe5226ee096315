"""The operator's calls to workers and gManagers, over gRPC."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc, types_pb2
from protos.infinite_llm.v1 import worker_pb2 as pb
from protos.infinite_llm.v1 import worker_pb2_grpc as pb_grpc
from services.common.errors import Unavailable
from services.common.rpc import new_server
from services.operator.cluster_view import ClusterViews, qualified
from services.operator.plan import Load
from services.operator.workers import Workers
from tests.unit.operator.builders import resource

unused: Any = None
"""A call that the operator does not make."""


class Worker(pb_grpc.WorkerServicer):
    def __init__(self) -> None:
        self.requests: list[pb.DrainRequest] = []
        self.answer = pb.DrainResponse()
        self.is_ending = False

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self.requests.append(request)
        return self.answer

    async def Undrain(self, request: pb.UndrainRequest, context: Any) -> pb.UndrainResponse:
        if self.is_ending:
            raise Unavailable("the instance is going to end")
        return pb.UndrainResponse()

    Generate = Abort = unused


class GManager(gmanager_pb2_grpc.GManagerServicer):
    async def GetClusterView(self, request: Any, context: Any) -> Any:
        info = types_pb2.InstanceInfo(control_address="10.0.0.1:7100")
        load = types_pb2.InstanceLoad(lent_blocks=3, running=2, waiting=4, draining=True)
        view = types_pb2.InstanceView(info=info, load=load)
        return gmanager_pb2.GetClusterViewResponse(instances=[view])

    Register = Heartbeat = Deregister = FindCreditors = GetDecisions = unused


@asynccontextmanager
async def listening(server: grpc.aio.Server) -> AsyncIterator[str]:
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=None)


async def test_a_worker_stays_and_says_when_nobody_needs_it() -> None:
    worker, server, workers = Worker(), new_server(), Workers()
    pb_grpc.add_WorkerServicer_to_server(worker, server)
    async with listening(server) as address:
        for answer in (pb.DrainResponse(open_requests=1), pb.DrainResponse(lent_blocks=1)):
            worker.answer = answer
            assert not await workers.drain(address, 30.0)
        worker.answer = pb.DrainResponse()
        assert await workers.drain(address, -5.0)
        assert await workers.undrain(address)
        worker.is_ending = True
        assert not await workers.undrain(address)
    assert all(request.stay and request.deadline_s > 0 for request in worker.requests)


async def test_a_worker_that_is_away_may_still_be_needed() -> None:
    assert not await Workers().drain("127.0.0.1:1", 30.0)
    assert not await Workers().undrain("127.0.0.1:1")


async def test_what_the_gmanager_knows() -> None:
    server, views = new_server(), ClusterViews()
    gmanager_pb2_grpc.add_GManagerServicer_to_server(GManager(), server)
    async with listening(server) as address:
        loads = await views.loads(resource(gmanagerAddress=f"127.0.0.1:1,{address}"))
    assert loads == {"10.0.0.1:7100": Load(3, 6, is_draining=True)}
    for away in ("127.0.0.1:1", "no port"):
        assert await views.loads(resource(gmanagerAddress=away)) is None
    await views.close()


def test_names_are_understood_as_the_pods_do() -> None:
    found = qualified("gm:7000,gm-0.gm:7000,10.1.2.3:7000,a.b.example:1,localhost:7", "ns")
    assert found == (
        "gm.ns.svc:7000",
        "gm-0.gm.ns.svc:7000",
        "gm-0.gm:7000",
        "10.1.2.3:7000",
        "a.b.example:1",
        "localhost:7",
    )
