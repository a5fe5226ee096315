"""Plays the kubelet for the pods of one namespace, and the workers in them, and their gManager.

A pod gets an address of this machine's loopback network, where a worker listens on the real port;
what it is ready for, and what it holds, a test decides.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc, types_pb2
from protos.infinite_llm.v1 import worker_pb2 as pb
from protos.infinite_llm.v1 import worker_pb2_grpc as pb_grpc
from services.common.rpc import new_server
from services.operator import paths
from services.operator.api import Api, ApiError
from services.operator.pods import CONTROL_PORT, DRAINING, format_time, parse_time
from services.operator.reconcile import WORKERS
from services.operator.resource import Object

_PERIOD_S = 0.1
unused: Any = None
"""A call that the operator does not make."""


@dataclass
class Worker(pb_grpc.WorkerServicer):
    address: str
    open_requests: int = 0
    lent_blocks: int = 0
    is_draining: bool = False
    is_loaded: bool = True
    has_ended: bool = False
    num_drains: int = 0
    server: grpc.aio.Server = field(default_factory=new_server)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        assert request.stay
        self.is_draining, self.num_drains = True, self.num_drains + 1
        return pb.DrainResponse(open_requests=self.open_requests, lent_blocks=self.lent_blocks)

    async def Undrain(self, request: pb.UndrainRequest, context: Any) -> pb.UndrainResponse:
        self.is_draining = False
        return pb.UndrainResponse()

    Generate = Abort = unused

    def end(self) -> None:
        """Its process has ended by itself."""
        self.open_requests = self.lent_blocks = 0
        self.has_ended = True

    @property
    def is_needed(self) -> bool:
        return bool(self.open_requests or self.lent_blocks)

    @property
    def view(self) -> types_pb2.InstanceView:
        info = types_pb2.InstanceInfo(control_address=self.address)
        load = types_pb2.InstanceLoad(
            lent_blocks=self.lent_blocks, running=self.open_requests, draining=self.is_draining
        )
        return types_pb2.InstanceView(info=info, load=load)


class Nodes(gmanager_pb2_grpc.GManagerServicer):
    """Owner of the workers; `run` plays until cancelled."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._network = f"127.{random.randint(1, 250)}.{random.randint(0, 250)}"
        self._num_addresses = 0
        self.workers: dict[str, Worker] = {}
        """By the pod's uid."""
        self.pods: dict[str, Object] = {}
        """As they were seen last, by name."""
        self.fewest_serving = 0
        self.wrongly_ended: list[str] = []
        """Pods that were deleted while somebody needed them and before their time was over."""
        self.must_load: Callable[[Object], bool] = lambda pod: True
        """False: the pod never becomes ready."""
        self.gmanager_address = ""
        self._server = new_server()

    Register = Heartbeat = Deregister = FindCreditors = GetDecisions = unused

    async def GetClusterView(self, request: Any, context: Any) -> Any:
        views = [worker.view for worker in self.workers.values() if worker.is_loaded]
        return gmanager_pb2.GetClusterViewResponse(instances=views)

    async def run(self) -> None:
        gmanager_pb2_grpc.add_GManagerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{self._network}.254:0")
        self.gmanager_address = f"{self._network}.254:{port}"
        await self._server.start()
        try:
            while True:
                await self._look()
                await asyncio.sleep(_PERIOD_S)
        finally:
            servers = [self._server, *(worker.server for worker in self.workers.values())]
            await asyncio.gather(*(server.stop(grace=None) for server in servers))

    @property
    def serving(self) -> list[str]:
        """Names of the pods that a request could go to."""
        return sorted(name for name, pod in self.pods.items() if self._is_serving(pod))

    def worker(self, name: str) -> Worker:
        return self.workers[self.pods[name]["metadata"]["uid"]]

    async def fail(self, name: str) -> None:
        """As if its node had thrown it out."""
        self.worker(name).end()
        status = {"phase": "Failed", "reason": "Evicted", "message": "no memory"}
        await self._api.patch(f"{paths.pod(self._namespace, name)}/status", {"status": status})

    def _is_serving(self, pod: Object) -> bool:
        metadata = pod["metadata"]
        worker = self.workers.get(metadata["uid"])
        is_leaving = DRAINING in metadata.get("annotations", {}) or "deletionTimestamp" in metadata
        return worker is not None and worker.is_loaded and not is_leaving

    async def _look(self) -> None:
        found = await self._api.list(paths.pods(self._namespace), WORKERS)
        before = {pod["metadata"]["uid"]: pod for pod in self.pods.values()}
        self.pods = {pod["metadata"]["name"]: pod for pod in found}
        uids = {pod["metadata"]["uid"] for pod in found}
        for uid in self.workers.keys() - uids:
            worker = self.workers.pop(uid)
            if worker.is_needed and not _is_over(before[uid]):
                self.wrongly_ended.append(before[uid]["metadata"]["name"])
            await worker.server.stop(grace=None)
        for pod in found:
            if pod["status"].get("phase") != "Failed":
                await self._start_or_report(pod)
        self.fewest_serving = min(self.fewest_serving, len(self.serving))

    async def _start_or_report(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self.workers:
            self._num_addresses += 1
            ip = f"{self._network}.{self._num_addresses}"
            worker = Worker(f"{ip}:{CONTROL_PORT}", is_loaded=self.must_load(pod))
            pb_grpc.add_WorkerServicer_to_server(worker, worker.server)
            worker.server.add_insecure_port(worker.address)
            await worker.server.start()
            self.workers[uid] = worker
        status = _status(self.workers[uid])
        now = pod["status"]
        if {key: now.get(key) for key in status} != status:
            path = f"{paths.pod(self._namespace, pod['metadata']['name'])}/status"
            try:
                await self._api.patch(path, {"status": status})
            except ApiError as error:
                assert error.is_gone, error.message


def _is_over(pod: Object) -> bool:
    deadline = pod["metadata"].get("annotations", {}).get(DRAINING)
    # The mark has whole seconds.
    return deadline is not None and time.time() >= parse_time(deadline) - 1


def _status(worker: Worker) -> Object:
    is_ready = worker.is_loaded and not worker.is_draining
    ip = worker.address.rpartition(":")[0]
    started_at = format_time(1_700_000_000)
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [{"type": "Ready", "status": str(is_ready)}],
        "containerStatuses": [
            {
                "name": "worker",
                "image": "worker",
                "imageID": "",
                "ready": is_ready,
                "started": worker.is_loaded,
                "restartCount": 0,
                "state": {"running": {"startedAt": started_at}},
            }
        ],
    }
