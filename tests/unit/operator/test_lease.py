"""One leads, whatever the server does; who was silent for a lease's length is followed."""

import asyncio

import pytest

from services.operator import paths
from services.operator.api import ApiError
from services.operator.lease import LeaseHolder
from tests.unit.operator.fake_api import FakeApi

PATH = f"{paths.leases('here')}/lease"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def api() -> FakeApi:
    return FakeApi()


def holder(api: FakeApi, clock: Clock, name: str) -> LeaseHolder:
    return LeaseHolder(api, "here", "lease", name, 15.0, clock)


def leaders(*holders: LeaseHolder) -> list[LeaseHolder]:
    return [each for each in holders if each.is_leader]


async def test_the_first_leads_and_the_second_waits(api: FakeApi, clock: Clock) -> None:
    one, two = holder(api, clock, "one"), holder(api, clock, "two")
    await one.step()
    await two.step()
    assert (one.is_leader, two.is_leader) == (True, False)
    assert api.objects[PATH]["spec"]["holderIdentity"] == "one"


async def test_an_empty_lease_that_was_made_before_is_taken(api: FakeApi, clock: Clock) -> None:
    api.put(PATH, {"metadata": {"name": "lease", "labels": {"a": "b"}}})
    one = holder(api, clock, "one")
    await one.step()
    assert one.is_leader
    assert api.objects[PATH]["metadata"]["labels"] == {"a": "b"}


async def test_who_cannot_renew_stops_before_anybody_else_begins(
    api: FakeApi, clock: Clock
) -> None:
    one, two = holder(api, clock, "one"), holder(api, clock, "two")
    await one.step()
    await two.step()

    def away(*_: str) -> None:
        raise ApiError(0, "away")

    api.fault_before = away
    clock.now_s += 8
    await one.step()
    assert leaders(one, two) == [one]
    clock.now_s += 2
    assert leaders(one, two) == []
    api.fault_before = lambda *_: None
    await two.step()
    assert leaders(one, two) == []
    clock.now_s += 5
    await two.step()
    await one.step()
    assert leaders(one, two) == [two]
    assert api.objects[PATH]["spec"]["leaseTransitions"] == 1


async def test_a_lease_that_is_renewed_is_not_taken(api: FakeApi, clock: Clock) -> None:
    one, two = holder(api, clock, "one"), holder(api, clock, "two")
    for _ in range(20):
        await one.step()
        await two.step()
        assert one.is_leader and not two.is_leader
        clock.now_s += 3


async def test_of_two_that_take_it_at_once_one_gets_it(api: FakeApi, clock: Clock) -> None:
    holders = [holder(api, clock, name) for name in ("one", "two")]
    api.put(PATH, {"metadata": {"name": "lease"}, "spec": {}})
    first = api.objects[PATH]

    def slip(method: str, path: str) -> None:
        if method == "PUT" and api.objects[PATH] is first:
            api.put(PATH, {"metadata": {"name": "lease"}, "spec": {"holderIdentity": "three"}})

    api.fault_before = slip
    for each in holders:
        await each.step()
    assert not any(each.is_leader for each in holders)


async def test_who_leaves_gives_it_back(api: FakeApi, clock: Clock) -> None:
    one, two = holder(api, clock, "one"), holder(api, clock, "two")
    await one.step()
    await one.resign()
    assert not one.is_leader
    await two.step()
    assert two.is_leader
    await one.resign()
    assert api.objects[PATH]["spec"]["holderIdentity"] == "two"


async def test_who_waits_is_told(api: FakeApi, clock: Clock) -> None:
    one = holder(api, clock, "one")
    waiting = asyncio.create_task(one.wait(is_leader=True))
    await asyncio.sleep(0)
    await one.step()
    await asyncio.wait_for(waiting, 1.0)
    losing = asyncio.create_task(one.wait(is_leader=False))
    await asyncio.sleep(0)
    assert not losing.done()
    await one.resign()
    await one.step()
    api.put(PATH, api.objects[PATH] | {"spec": {"holderIdentity": "two"}})
    await one.step()
    await asyncio.wait_for(losing, 1.0)
