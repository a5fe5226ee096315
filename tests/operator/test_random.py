"""Everything at once, at random: numbers, templates, pods, operators and the way to the server.

OPERATOR_TEST_SECONDS and OPERATOR_TEST_SEED make it last longer, and be another one.
"""

import asyncio
import os
import random
import time
from contextlib import AsyncExitStack

import pytest

from services.operator import paths
from services.operator.api import Api, ApiError
from services.operator.pods import DRAINING
from tests.operator.conftest import NAME, Place
from tests.operator.line import Line, over_a_line

SECONDS = float(os.environ.get("OPERATOR_TEST_SECONDS", "15"))
SEED = int(os.environ.get("OPERATOR_TEST_SEED", "7"))


class Mischief:
    def __init__(
        self, place: Place, operators: list[tuple[Api, Line]], dice: random.Random
    ) -> None:
        self._place = place
        self._operators = operators
        self._dice = dice
        self.replicas = 3

    async def act(self) -> None:
        actions = [
            self.scale,
            self.scale,
            self.update,
            self.fail,
            self.delete,
            self.cut,
            self.unmark,
        ]
        await self._dice.choice(actions)()
        for worker in self._place.nodes.workers.values():
            if worker.is_draining:
                worker.open_requests = max(0, worker.open_requests - 1)
                worker.lent_blocks = max(0, worker.lent_blocks - 5)
            elif not worker.has_ended:
                worker.open_requests = self._dice.randint(0, 4)
                worker.lent_blocks = self._dice.randint(0, 20)

    async def scale(self) -> None:
        self.replicas = self._dice.randint(0, 6)
        await self._place.scale(self.replicas)

    async def update(self) -> None:
        await self._place.patch(image=f"worker:{self._dice.randint(1, 3)}")

    async def fail(self) -> None:
        name = self._any_pod()
        if name is not None:
            await self._place.nodes.fail(name)

    async def delete(self) -> None:
        """As if somebody did not know better; the worker would drain by itself."""
        name = self._any_pod()
        if name is not None:
            self._place.nodes.worker(name).end()
            metadata = self._place.nodes.pods[name]["metadata"]
            await self._place.api.delete(paths.pod(self._place.namespace, name), metadata["uid"])

    async def cut(self) -> None:
        _, line = self._dice.choice(self._operators)
        line.is_cut = not line.is_cut
        if line.is_cut:
            line.cut()

    async def unmark(self) -> None:
        name = self._any_pod()
        if name is not None:
            path = paths.pod(self._place.namespace, name)
            await self._place.api.patch(path, {"metadata": {"annotations": {DRAINING: None}}})

    def _any_pod(self) -> str | None:
        nodes = self._place.nodes
        names = sorted(
            n for n, pod in nodes.pods.items() if pod["metadata"]["uid"] in nodes.workers
        )
        return self._dice.choice(names) if names else None


@pytest.mark.timeout(int(SECONDS) + 120)
async def test_it_ends_right_after_anything_has_happened(place: Place) -> None:
    dice = random.Random(SEED)
    async with AsyncExitStack() as stack:
        operators = [await stack.enter_async_context(over_a_line()) for _ in range(2)]
        for api, _ in operators:
            await stack.enter_async_context(place.operator(api))
        await place.create(replicas=3, drainTimeoutSeconds=4)
        mischief = Mischief(place, operators, dice)
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            try:
                await mischief.act()
            except ApiError as error:
                assert error.is_gone or error.is_conflict, error.message
            await asyncio.sleep(dice.random())
        for _, line in operators:
            line.is_cut = False
        for worker in place.nodes.workers.values():
            worker.open_requests = worker.lent_blocks = 0
        await place.until_serving(mischief.replicas)
        await place.until_condition("Ready", "True")
        image = (await place.read())["spec"]["image"]
        pods = place.nodes.pods.values()
        assert {pod["spec"]["containers"][0]["image"] for pod in pods} <= {image}
        assert not any(worker.is_draining for worker in place.nodes.workers.values())
        assert all(name.startswith(f"{NAME}-w-") for name in place.nodes.pods)
