"""An operator's loop around the server in memory, with workers that answer at once."""

import asyncio

from prometheus_client import CollectorRegistry

from services.operator import paths
from services.operator.api import ApiError
from services.operator.cluster_view import ClusterViews
from services.operator.metrics import OperatorMetrics
from services.operator.plan import Load
from services.operator.reconcile import Looked, Reconciler
from services.operator.resource import Key, Object, Resource
from services.operator.workers import Workers
from tests.unit.operator.builders import NAME, NAMESPACE, NOW_S, resource_object
from tests.unit.operator.fake_api import FakeApi

KEY = Key(NAMESPACE, NAME)


class FakeViews(ClusterViews):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[str, Load] | None = {}

    async def loads(self, resource: Resource) -> dict[str, Load] | None:
        await asyncio.sleep(0)
        return self.known


class FakeWorkers(Workers):
    """Says who was told what; `busy` are those that are still needed."""

    def __init__(self) -> None:
        self.draining: set[str] = set()
        self.busy: set[str] = set()
        self.deaf: set[str] = set()

    async def drain(self, address: str, left_s: float) -> bool:
        if address in self.deaf:
            return False
        self.draining.add(address)
        return address not in self.busy

    async def undrain(self, address: str) -> bool:
        if address in self.deaf:
            return False
        self.draining.discard(address)
        return True


class Rig:
    def __init__(self, **spec: object) -> None:
        self.api = FakeApi()
        self.views = FakeViews()
        self.workers = FakeWorkers()
        self.is_leader = True
        self.now_s = NOW_S
        self.metrics = OperatorMetrics(CollectorRegistry())
        self.restart()
        self.write(**spec)

    def restart(self) -> None:
        """The operator's process is a new one."""
        self.reconciler = Reconciler(
            self.api, self.views, self.workers, self.metrics, lambda: self.is_leader,
            lambda: self.now_s,
        )  # fmt: skip

    def write(self, **spec: object) -> None:
        path = paths.resource(KEY)
        before = self.api.objects.get(path, {})
        body = resource_object(**(before.get("spec", {}) | spec))
        self.api.put(path, before | {"spec": body["spec"]} if before else body)

    async def look(self) -> Looked:
        return await self.reconciler.look_at(KEY)

    async def settle(self, limit: int = 40) -> None:
        """Until nothing is left to do; every failed look is simply made again."""
        for _ in range(limit):
            before = self.pods
            try:
                await self.look()
            except ApiError:
                continue
            self.run_pods()
            if self.pods == before and not self.workers.draining:
                return
        raise AssertionError("never settles")

    def run_pods(self) -> None:
        """The kubelet, and what the gManager hears of it."""
        self.api.run_pods()
        addresses = {f"{pod['status']['podIP']}:7100" for pod in self.pods.values()}
        self.workers.draining &= addresses
        self.views.known = {
            address: Load(is_draining=address in self.workers.draining) for address in addresses
        }

    @property
    def pods(self) -> dict[str, Object]:
        return {
            body["metadata"]["name"]: body
            for path, body in self.api.objects.items()
            if "/pods/" in path
        }

    @property
    def status(self) -> Object:
        found: Object = self.api.objects[paths.resource(KEY)].get("status", {})
        return found

    @property
    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.api.events]
