"""A namespace of its own for each test, with nodes, and operators that run in this process."""

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.operator import paths
from services.operator.api import Api, ApiError, connect
from services.operator.apply_definitions import apply_definitions
from services.operator.cluster_view import ClusterViews
from services.operator.config import OperatorConfig
from services.operator.leading import Leading
from services.operator.lease import LeaseHolder
from services.operator.metrics import OperatorMetrics
from services.operator.resource import Key, Object
from tests.operator.nodes import Nodes

DEFINITIONS = Path(__file__).parents[2] / "charts/infinite-llm/crds"
NAME = "llm"
LEASE_S = 3.0
DEADLINE_S = 40.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "needs an API server: KUBECONFIG is not set"
    for item in items:
        if Path(__file__).parent in item.path.parents and "KUBECONFIG" not in os.environ:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = await connect(os.environ["KUBECONFIG"])
    try:
        await api.get("/version")
    except ApiError as error:
        await api.close()
        pytest.skip(f"KUBECONFIG names an API server that cannot be used: {error.message}")
    await apply_definitions(api, DEFINITIONS)
    yield api
    await api.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.05)


@dataclass
class Place:
    """One namespace and what plays in it."""

    api: Api
    namespace: str
    nodes: Nodes

    async def create(self, name: str = NAME, **spec: Any) -> None:
        body = {
            "apiVersion": "infinite-llm.io/v1alpha1",
            "kind": "InfiniteLLM",
            "metadata": {"name": name},
            "spec": self.spec(**spec),
        }
        await self.api.create(paths.resources(self.namespace), body)

    def spec(self, **spec: Any) -> Object:
        """Pods that no scheduler places, so that no real node interferes."""
        return {
            "model": "m",
            "image": "worker:1",
            "gmanagerAddress": self.nodes.gmanager_address,
            "podTemplate": {"spec": {"schedulerName": "none"}},
            **spec,
        }

    async def patch(self, name: str = NAME, **spec: Any) -> None:
        await self.api.patch(self.path(name), {"spec": spec})

    async def scale(self, replicas: int) -> None:
        """As `kubectl scale` and autoscalers do."""
        await self.api.patch(f"{self.path()}/scale", {"spec": {"replicas": replicas}})

    async def read(self, name: str = NAME) -> Object:
        return await self.api.get(self.path(name))

    async def status(self, name: str = NAME) -> Object:
        found: Object = (await self.read(name))["status"]
        return found

    async def condition(self, kind: str) -> Object:
        conditions: list[Object] = (await self.status())["conditions"]
        return next((c for c in conditions if c["type"] == kind), {"status": "", "reason": ""})

    async def until_condition(self, kind: str, status: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self.condition(kind))["status"] != status:
                await asyncio.sleep(0.1)

    async def reasons(self) -> list[str]:
        events = await self.api.list(paths.events(self.namespace))
        mine = [e for e in events if e["involvedObject"]["kind"] == "InfiniteLLM"]
        return [event["reason"] for event in sorted(mine, key=lambda e: int(
            e["metadata"]["resourceVersion"]))]  # fmt: skip

    def path(self, name: str = NAME) -> str:
        return paths.resource(Key(self.namespace, name))

    async def until_serving(self, count: int) -> None:
        await until(lambda: len(self.nodes.serving) == len(self.nodes.pods) == count)

    @asynccontextmanager
    async def operator(
        self, api: Api | None = None, namespaces: str | None = None
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Cancelling the task is its sudden end: it gives nothing back."""
        config = OperatorConfig(
            namespace=self.namespace,
            watch_namespaces=self.namespace if namespaces is None else namespaces,
            lease_s=LEASE_S,
            resync_s=2.0,
        )
        views = ClusterViews()
        api = api or self.api
        lease = LeaseHolder(
            api, self.namespace, config.lease_name, uuid.uuid4().hex, LEASE_S, time.monotonic
        )
        leading = Leading(config, api, views, lease, OperatorMetrics(CollectorRegistry()))
        stop = asyncio.Event()
        task = asyncio.create_task(leading.run(stop))
        try:
            yield task
        finally:
            stop.set()
            await asyncio.gather(task, return_exceptions=True)
            await views.close()


@asynccontextmanager
async def new_place(api: Api) -> AsyncIterator[Place]:
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    await api.create("/api/v1/namespaces", body)
    nodes = Nodes(api, namespace)
    playing = asyncio.create_task(nodes.run())
    await until(lambda: bool(nodes.gmanager_address))
    try:
        yield Place(api, namespace, nodes)
    finally:
        playing.cancel()
        (outcome,) = await asyncio.gather(playing, return_exceptions=True)
        found = await api.get(f"/api/v1/namespaces/{namespace}")
        try:
            await api.delete(f"/api/v1/namespaces/{namespace}", found["metadata"]["uid"])
        except ApiError as error:
            assert error.is_conflict, error.message
        assert isinstance(outcome, asyncio.CancelledError), outcome
        assert not nodes.wrongly_ended


@pytest.fixture
async def place(api: Api) -> AsyncIterator[Place]:
    async with new_place(api) as place:
        yield place
