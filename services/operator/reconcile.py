"""One look at one resource: read everything, decide (`plan`), do it, say so (`status`, `events`).

Remembers nothing that it could not read again, but for instance ids: of names that turned out to be
taken, and of pods that are made for one resource while another one is being looked at.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from services.common.errors import InvalidRequest
from services.operator import events, paths, pods
from services.operator.api import Api, ApiError
from services.operator.cluster_view import ClusterViews
from services.operator.metrics import OperatorMetrics
from services.operator.plan import (
    Action,
    CancelDrain,
    Create,
    Delete,
    Seen,
    StartDrain,
    Wanted,
    make_plan,
)
from services.operator.pod_template import worker_pod
from services.operator.pods import DRAINING, Pod, Trouble
from services.operator.resource import Key, Object, Resource, condition_of, parse
from services.operator.status import Condition, Counts, make_status, merge_conditions
from services.operator.template_hash import template_hash
from services.operator.workers import Workers

_log = logging.getLogger(__name__)

#: All workers, whoever they belong to: instance ids are unique in a namespace, because two
#: resources may share one gManager.
WORKERS = {"app.kubernetes.io/name": "infinite-llm", "app.kubernetes.io/component": "worker"}


class Looked(NamedTuple):
    is_gone: bool = False
    has_failed: bool = False
    """Something could not be done; it is worth another try."""
    again_in_s: float | None = None
    """None: when something changes."""


class Reconciler:
    def __init__(
        self,
        api: Api,
        views: ClusterViews,
        workers: Workers,
        metrics: OperatorMetrics,
        may_act: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`may_act`: whether we still lead; asked before everything that is done."""
        self._api = api
        self._views = views
        self._workers = workers
        self._metrics = metrics
        self._may_act = may_act
        self._clock = clock
        self._taken: dict[Key, set[int]] = {}
        self._held: dict[Key, set[int]] = {}

    async def look_at(self, key: Key) -> Looked:
        """Raises ApiError where the server does not tell what there is, or is away."""
        try:
            found = await self._api.get(paths.resource(key))
        except ApiError as error:
            if not error.is_gone:
                raise
            self._taken.pop(key, None)
            self._held.pop(key, None)
            self._metrics.forget(key)
            return Looked(is_gone=True)
        if "deletionTimestamp" in found["metadata"]:
            return Looked()  # its pods go by themselves
        try:
            resource = parse(found)
        except InvalidRequest as error:
            await self._refuse(key, found, error.message)
            return Looked()
        return await self._reconcile(resource, found.get("status", {}))

    async def _reconcile(self, resource: Resource, status: Object) -> Looked:
        mine, others = await self._pods(resource)
        loads, drained = await asyncio.gather(self._views.loads(resource), self._drained(mine))
        wanted = Wanted(
            resource.replicas,
            resource.max_unavailable,
            resource.drain_timeout_s,
            template_hash(resource),
        )
        taken = others | self._ids_of_others(resource.key)
        plan = make_plan(wanted, Seen(mine, loads, drained, taken, self._clock()))
        made = {action.inst_id for action in plan.actions if isinstance(action, Create)}
        self._held[resource.key] = made | {pod.inst_id for pod in mine}
        trouble = await self._carry_out(resource, plan.actions)
        counts = Counts.of(mine, wanted.template_hash)
        await self._tell(resource, mine, counts, trouble, status)
        self._metrics.observe(resource.key, resource.replicas, counts)
        return Looked(has_failed=trouble is not None, again_in_s=plan.look_again_in_s)

    # -- what there is ----------------------------------------------------------------------------

    async def _pods(self, resource: Resource) -> tuple[list[Pod], set[int]]:
        """The resource's own pods, and the instance ids that others have."""
        found = await self._api.list(paths.pods(resource.key.namespace), WORKERS)
        mine = [pods.parse(pod) for pod in found if pods.owner_of(pod) == resource.uid]
        others = {pods.inst_id_of(pod) for pod in found if pods.owner_of(pod) != resource.uid}
        return [pod for pod in mine if pod is not None], {i for i in others if i is not None}

    async def _drained(self, mine: Sequence[Pod]) -> frozenset[str]:
        """Asks all who leave; who was started anew hears of it this way, too."""
        leaving = [
            pod for pod in mine
            if pod.drain_deadline_s is not None and pod.is_running and not pod.is_terminating
        ]  # fmt: skip
        answers = await asyncio.gather(*(self._drain(pod, pod.drain_deadline_s) for pod in leaving))
        return frozenset(pod.name for pod, is_drained in zip(leaving, answers, strict=True)
                         if is_drained)  # fmt: skip

    async def _drain(self, pod: Pod, deadline_s: float | None) -> bool:
        if deadline_s is None or not pod.address:
            return False
        return await self._workers.drain(pod.address, deadline_s - self._clock())

    def _ids_of_others(self, key: Key) -> set[int]:
        """That the list does not show, or not yet."""
        ids = set(self._taken.get(key, ()))
        for other, held in self._held.items():
            if other.namespace == key.namespace and other != key:
                ids |= held
        return ids

    # -- what is done -----------------------------------------------------------------------------

    async def _carry_out(self, resource: Resource, actions: Sequence[Action]) -> Trouble | None:
        """One failure does not hold up the rest; the last one is told. Raises where the server is
        away."""
        trouble = None
        for action in actions:
            if not self._may_act():
                return None
            try:
                is_done = await self._do(resource, action)
            except ApiError as error:
                if error.status == 0:
                    raise
                trouble = Trouble(f"Failed{type(action).__name__}", error.message)
                continue
            news = events.news_of(resource, action) if is_done else None
            if news is not None:
                self._metrics.actions.labels(news.reason).inc()
                await events.publish(self._api, resource, news, self._clock())
        return trouble

    async def _do(self, resource: Resource, action: Action) -> bool:
        """False where it turned out that there was nothing to do, or not yet."""
        match action:
            case Create(inst_id, num_failures):
                return await self._create(resource, inst_id, num_failures)
            case StartDrain(pod, deadline_s, _):
                if not await self._mark(resource, pod, pods.format_time(deadline_s)):
                    return False
                await self._drain(pod, deadline_s)
                return True
            case CancelDrain(pod):
                if pod.is_running and not await self._workers.undrain(pod.address):
                    return False  # it would stay out of service without anybody knowing
                return not pod.is_draining or await self._mark(resource, pod, None)
            case Delete(pod, _):
                path = paths.pod(resource.key.namespace, pod.name)
                return await _unless_gone(self._api.delete(path, pod.uid))

    async def _create(self, resource: Resource, inst_id: int, num_failures: int) -> bool:
        key = resource.key
        body = worker_pod(resource, inst_id, num_failures)
        try:
            await self._api.create(paths.pods(key.namespace), body)
        except ApiError as error:
            if not error.is_conflict:
                raise
            found = await self._api.get(paths.pod(key.namespace, body["metadata"]["name"]))
            if pods.owner_of(found) != resource.uid:
                self._taken.setdefault(key, set()).add(inst_id)
                raise
            return False  # it was made by a call whose answer was lost
        return True

    async def _mark(self, resource: Resource, pod: Pod, deadline: str | None) -> bool:
        path = paths.pod(resource.key.namespace, pod.name)
        # The uid makes it a conflict where the pod is another one by now.
        metadata = {"uid": pod.uid, "annotations": {DRAINING: deadline}}
        return await _unless_gone(self._api.patch(path, {"metadata": metadata}))

    # -- what is told -----------------------------------------------------------------------------

    async def _tell(
        self,
        resource: Resource,
        mine: Sequence[Pod],
        counts: Counts,
        trouble: Trouble | None,
        before: Object,
    ) -> None:
        now_s = self._clock()
        status = make_status(resource, mine, counts, trouble, before, now_s)
        if status == before or not self._may_act():
            return
        if not await _unless_gone(self._api.patch(paths.status(resource.key), {"status": status})):
            return
        degraded = condition_of(status, "Degraded")
        was = condition_of(before, "Degraded")
        is_news = degraded["reason"] != was.get("reason")
        if degraded["status"] == "True" and is_news:
            news = events.News(degraded["reason"], degraded["message"], is_warning=True)
            await events.publish(self._api, resource, news, now_s)

    async def _refuse(self, key: Key, found: Object, message: str) -> None:
        before = found.get("status", {})
        generation = found["metadata"].get("generation", 0)
        degraded = Condition("Degraded", True, "InvalidSpec", message[:1000])
        conditions = merge_conditions([degraded], before, generation, self._clock())
        status = {"observedGeneration": generation, "conditions": conditions}
        if conditions != before.get("conditions"):
            await _unless_gone(self._api.patch(paths.status(key), {"status": status}))


async def _unless_gone(call: Awaitable[object]) -> bool:
    """False where the object is gone, or another one by now."""
    try:
        await call
    except ApiError as error:
        if error.is_gone or error.is_conflict:
            return False
        raise
    return True
