"""Work is done while the lease is held, and it can be ended at any moment."""

import asyncio
import random
import time
from collections.abc import Callable

from services.operator import paths
from services.operator.api import ApiError
from services.operator.config import OperatorConfig
from services.operator.leading import Leading
from services.operator.lease import LeaseHolder
from tests.unit.operator.builders import NAMESPACE
from tests.unit.operator.rig import FakeViews, Rig

CONFIG = OperatorConfig(namespace=NAMESPACE, watch_namespaces=NAMESPACE, resync_s=0.01)


def build(rig: Rig, lease_s: float) -> Leading:
    lease = LeaseHolder(rig.api, NAMESPACE, "lease", "me", lease_s, time.monotonic)
    return Leading(CONFIG, rig.api, FakeViews(), lease, rig.metrics)


def _values(rig: Rig) -> dict[str, list[float]]:
    """Of the gauges."""
    gauges = (rig.metrics.leading, rig.metrics.replicas)
    found = [sample for gauge in gauges for family in gauge.collect() for sample in family.samples]
    return {sample.name: [s.value for s in found if s.name == sample.name] for sample in found}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.005)


async def test_it_stops_whenever_it_is_told_to() -> None:
    """Also in the very moment in which something else happens."""
    dice = random.Random(7)
    for _ in range(40):
        stop = asyncio.Event()
        running = asyncio.create_task(build(Rig(replicas=2), lease_s=0.01).run(stop))
        await asyncio.sleep(dice.random() * 0.03)
        stop.set()
        async with asyncio.timeout(5.0):
            await running


async def test_without_the_lease_nothing_is_done_and_with_it_it_goes_on() -> None:
    rig, stop = Rig(replicas=1), asyncio.Event()
    leading = build(rig, lease_s=0.3)
    running = asyncio.create_task(leading.run(stop))
    await until(lambda: len(rig.pods) == 1 and leading.is_ready)

    def refuse(method: str, path: str) -> None:
        if path.startswith(paths.leases(NAMESPACE)):
            raise ApiError(0, "away")

    rig.api.fault_before = refuse
    await until(lambda: _values(rig) == {"infinite_llm_operator_leading": [0.0]})
    rig.write(replicas=3)
    await asyncio.sleep(0.1)
    assert len(rig.pods) == 1
    rig.api.fault_before = lambda *_: None
    await until(lambda: len(rig.pods) == 3)
    stop.set()
    await running
    assert rig.api.objects[f"{paths.leases(NAMESPACE)}/lease"]["spec"]["holderIdentity"] == ""
