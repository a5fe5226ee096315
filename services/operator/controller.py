"""The loop: who is to be looked at, and when. Run by `__main__` while this operator leads.

One task per resource looks at it when it is woken: by a watch, by the resync, or by its own clock.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from services.common.errors import InfiniteLLMError
from services.operator import paths
from services.operator.api import Api, ApiError
from services.operator.metrics import OperatorMetrics
from services.operator.reconcile import WORKERS, Looked, Reconciler
from services.operator.resource import KIND, Key, Object, key_of
from services.operator.watch import watch

_log = logging.getLogger(__name__)

#: Changes come in bursts.
_SETTLE_S = 0.05
_FIRST_BACKOFF_S = 1.0
_LONGEST_BACKOFF_S = 30.0
_MAX_AT_ONCE = 8


class Controller:
    def __init__(
        self,
        api: Api,
        reconciler: Reconciler,
        namespaces: Sequence[str],
        resync_s: float,
        metrics: OperatorMetrics,
    ) -> None:
        """`namespaces`: none means all."""
        self._api = api
        self._reconciler = reconciler
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._resync_s = resync_s
        self._metrics = metrics
        self._wakes: dict[Key, asyncio.Event] = {}
        self._tasks = asyncio.TaskGroup()
        self._at_once = asyncio.Semaphore(_MAX_AT_ONCE)
        self._unseen: set[Key] | None = None
        """Of those who were there at the start; None before that is known."""

    @property
    def is_synced(self) -> bool:
        """Whether everything that was there at the start has been looked at once."""
        return self._unseen is not None and not self._unseen

    async def run(self) -> None:
        """Until cancelled; once."""
        async with self._tasks:
            for namespace in self._namespaces:
                self._watch(paths.resources(namespace), None, self._on_resource)
                self._watch(paths.pods(namespace), WORKERS, self._on_pod)
            await self._resync()

    def _watch(
        self, path: str, selector: dict[str, str] | None, on_change: Callable[[Object], None]
    ) -> None:
        self._tasks.create_task(watch(self._api, path, selector, on_change))

    async def _resync(self) -> None:
        while True:
            try:
                found = [
                    resource
                    for namespace in self._namespaces
                    for resource in await self._api.list(paths.resources(namespace))
                ]
            except ApiError as error:
                _log.warning("cannot list the resources", extra={"reason": error.message})
            else:
                if self._unseen is None:
                    self._unseen = {key_of(resource) for resource in found}
                for key in {key_of(resource) for resource in found} | self._wakes.keys():
                    self._wake(key)
            await asyncio.sleep(self._resync_s if self._unseen is not None else _FIRST_BACKOFF_S)

    def _on_resource(self, resource: Object) -> None:
        self._wake(key_of(resource))

    def _on_pod(self, pod: Object) -> None:
        metadata = pod["metadata"]
        for owner in metadata.get("ownerReferences", []):
            if owner["kind"] == KIND:
                self._wake(Key(metadata["namespace"], owner["name"]))

    def _wake(self, key: Key) -> None:
        if key not in self._wakes:
            self._wakes[key] = asyncio.Event()
            self._tasks.create_task(self._keep(key, self._wakes[key]))
        self._wakes[key].set()

    async def _keep(self, key: Key, wake: asyncio.Event) -> None:
        """Looks at one resource until it is gone."""
        backoff_s, again_in_s, pause_s = _FIRST_BACKOFF_S, None, _SETTLE_S
        while True:
            await _wait(wake, again_in_s)
            await asyncio.sleep(pause_s)
            wake.clear()
            looked = await self._look_at(key)
            if self._unseen is not None:
                self._unseen.discard(key)
            if looked.is_gone:
                del self._wakes[key]
                return
            again_in_s, pause_s = looked.again_in_s, _SETTLE_S
            if looked.has_failed:
                again_in_s = min(backoff_s, backoff_s if again_in_s is None else again_in_s)
                backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
                # A failure may itself be a change that wakes.
                pause_s = _FIRST_BACKOFF_S
            else:
                backoff_s = _FIRST_BACKOFF_S

    async def _look_at(self, key: Key) -> Looked:
        async with self._at_once:
            started_s = time.monotonic()
            try:
                looked = await self._reconciler.look_at(key)
            except InfiniteLLMError as error:
                name = f"{key.namespace}/{key.name}"
                _log.warning("failed", extra={"resource": name, "reason": error.message})
                looked = Looked(has_failed=True)
            except Exception:
                _log.exception("failed", extra={"resource": f"{key.namespace}/{key.name}"})
                looked = Looked(has_failed=True)
            self._metrics.reconcile_s.observe(time.monotonic() - started_s)
        self._metrics.reconciles.labels("failed" if looked.has_failed else "ok").inc()
        return looked


async def _wait(wake: asyncio.Event, at_most_s: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await wake.wait()
