"""Who is looked at, and when: watches wake, the resync finds what they missed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.operator import controller as controllers
from services.operator import paths
from services.operator.api import ApiError
from services.operator.controller import Controller
from tests.unit.operator.builders import NAMESPACE, resource_object
from tests.unit.operator.rig import KEY, Rig


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(controllers, "_SETTLE_S", 0.0)


@asynccontextmanager
async def running(rig: Rig, resync_s: float = 600.0) -> AsyncIterator[Controller]:
    controller = Controller(rig.api, rig.reconciler, [NAMESPACE], resync_s, rig.metrics)
    task = asyncio.create_task(controller.run())
    yield controller
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_change_is_acted_upon_at_once(quick: None) -> None:
    rig = Rig(replicas=1)
    async with running(rig):
        await until(lambda: len(rig.pods) == 1)
        rig.write(replicas=3)
        await until(lambda: len(rig.pods) == 3)
        rig.api.remove(paths.pod(NAMESPACE, "small-w-1"))
        await until(lambda: len(rig.pods) == 3)


async def test_without_watches_the_resync_sees_everything(quick: None) -> None:
    rig = Rig(replicas=1)

    def break_watches(method: str, path: str) -> None:
        if method == "WATCH":
            raise ApiError(410, "too old")

    rig.api.fault_before = break_watches
    async with running(rig, resync_s=0.02):
        await until(lambda: len(rig.pods) == 1)
        rig.write(replicas=2)
        await until(lambda: len(rig.pods) == 2)
        rig.api.put(f"{paths.resources(NAMESPACE)}/other", resource_object("other"))
        await until(lambda: len(rig.pods) == 3)
    assert sum(method == "WATCH" for method, _ in rig.api.calls) <= 4


async def test_it_is_ready_when_everything_was_looked_at_once(quick: None) -> None:
    rig = Rig(replicas=1)
    rig.api.fault_before = lambda *_: (_ for _ in ()).throw(ApiError(0, "away"))
    async with running(rig) as controller:
        await asyncio.sleep(0.05)
        assert not controller.is_synced
        rig.api.fault_before = lambda *_: None
        await until(lambda: controller.is_synced)
        assert rig.pods


async def test_what_failed_is_looked_at_again(quick: None) -> None:
    rig = Rig(replicas=1)
    failures = iter([ApiError(500, "oops"), ValueError("a bug")])

    def fail(method: str, path: str) -> None:
        error = next(failures, None) if path == paths.resource(KEY) else None
        if error is not None:
            raise error

    rig.api.fault_before = fail
    async with running(rig):
        await until(lambda: len(rig.pods) == 1)


async def test_a_resource_that_is_gone_is_forgotten_and_may_come_again(quick: None) -> None:
    rig = Rig(replicas=1)
    async with running(rig) as controller:
        await until(lambda: len(rig.pods) == 1)
        rig.api.remove(paths.resource(KEY))
        rig.api.remove(paths.pod(NAMESPACE, "small-w-0"))
        await until(lambda: not controller._wakes)
        rig.write(replicas=2)
        await until(lambda: len(rig.pods) == 2)


async def test_what_is_refused_is_not_asked_for_in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal has another text, so that each makes another status, which wakes."""
    monkeypatch.setattr(controllers, "_FIRST_BACKOFF_S", 0.1)
    rig = Rig(replicas=1)
    refusals: list[str] = []

    def refuse(method: str, path: str) -> None:
        if method == "POST" and path.endswith("/pods"):
            refusals.append(path)
            raise ApiError(403, f"{len(refusals)} is too many")

    rig.api.fault_before = refuse
    async with running(rig):
        await asyncio.sleep(0.55)
        assert 2 <= len(refusals) <= 6
