"""Works while the Lease is ours, waits while it is not. Built and run by `__main__`."""

import asyncio

from services.operator.api import Api
from services.operator.cluster_view import ClusterViews
from services.operator.config import OperatorConfig
from services.operator.controller import Controller
from services.operator.lease import LeaseHolder
from services.operator.metrics import OperatorMetrics
from services.operator.reconcile import Reconciler
from services.operator.workers import Workers


class Leading:
    def __init__(
        self,
        config: OperatorConfig,
        api: Api,
        views: ClusterViews,
        lease: LeaseHolder,
        metrics: OperatorMetrics,
    ) -> None:
        self._config = config
        self._api = api
        self._views = views
        self._lease = lease
        self._metrics = metrics
        self._controller: Controller | None = None

    @property
    def is_ready(self) -> bool:
        """A leader that has looked at everything once, or somebody who could take over."""
        if self._controller is not None:
            return self._controller.is_synced
        return self._lease.has_answer and not self._lease.is_leader

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            own = [tasks.create_task(self._lease.run()), tasks.create_task(self._alternate())]
            await stop.wait()
            for task in own:
                task.cancel()
        await self._lease.resign()

    async def _alternate(self) -> None:
        while True:
            await self._lease.wait(is_leader=True)
            self._metrics.leading.set(1)
            try:
                await self._work()
            finally:
                self._metrics.rest()
                self._controller = None

    async def _work(self) -> None:
        """Until the Lease is lost."""
        reconciler = Reconciler(
            self._api, self._views, Workers(), self._metrics, lambda: self._lease.is_leader
        )
        config = self._config
        self._controller = Controller(
            self._api, reconciler, config.namespaces, config.resync_s, self._metrics
        )
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(self._controller.run())
            await self._lease.wait(is_leader=False)
            working.cancel()
