"""The operator on the real API server: from nothing to ready, and through all that may happen."""

import asyncio

from services.operator import paths
from services.operator.api import Api
from services.operator.pods import DRAINING
from tests.operator.conftest import LEASE_S, NAME, Place, new_place, until


async def test_from_nothing_to_ready_and_away(place: Place) -> None:
    async with place.operator():
        await place.create(replicas=3)
        await place.until_serving(3)
        await place.until_condition("Ready", "True")
        status = await place.status()
        assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (3, 3, 3)
        assert status["observedGeneration"] == 1
        scale = await place.api.get(f"{place.path()}/scale")
        assert scale["status"] == {"replicas": 3, "selector": status["selector"]}
        selector = dict(item.split("=") for item in status["selector"].split(","))
        found = await place.api.list(paths.pods(place.namespace), selector)
        assert len(found) == 3
        assert await place.reasons() == ["Created"] * 3
        resource = await place.read()
        await place.api.delete(place.path(), resource["metadata"]["uid"])
        await until(lambda: not place.nodes.pods)  # the garbage collector's work


async def test_at_rest_nothing_is_written(place: Place) -> None:
    async with place.operator():
        await place.create(replicas=2, podTemplate={"spec": {"schedulerName": "none"}})
        await place.until_serving(2)
        await place.until_condition("Ready", "True")
        await asyncio.sleep(0.5)
        before = [(await place.read())["metadata"]["resourceVersion"], place.nodes.pods]
        await asyncio.sleep(4.5)  # two resyncs
        assert [(await place.read())["metadata"]["resourceVersion"], place.nodes.pods] == before


async def test_fewer_are_wanted(place: Place) -> None:
    """The one that holds the least goes, once nobody needs it."""
    nodes = place.nodes
    async with place.operator():
        await place.create(replicas=3)
        await place.until_serving(3)
        for inst_id, requests in enumerate((3, 1, 2)):
            nodes.worker(f"{NAME}-w-{inst_id}").open_requests = requests
        await place.scale(2)
        leaver = f"{NAME}-w-1"
        await until(lambda: nodes.worker(leaver).is_draining)
        await place.until_condition("Draining", "True")
        await asyncio.sleep(2.5)
        assert leaver in nodes.pods
        nodes.worker(leaver).open_requests = 0
        await until(lambda: leaver not in nodes.pods)
        assert nodes.serving == [f"{NAME}-w-0", f"{NAME}-w-2"]
        assert (await place.reasons())[-2:] == ["Draining", "Drained"]


async def test_a_drain_is_called_back(place: Place) -> None:
    nodes = place.nodes
    async with place.operator():
        await place.create(replicas=2)
        await place.until_serving(2)
        for worker in nodes.workers.values():
            worker.lent_blocks = 7
        await place.scale(1)
        await until(lambda: len(nodes.serving) == 1)
        await place.scale(2)
        await place.until_serving(2)
        assert not any(worker.is_draining for worker in nodes.workers.values())
        await until(lambda: all(DRAINING not in pod["metadata"].get("annotations", {})
                                for pod in nodes.pods.values()))  # fmt: skip
        assert "DrainCancelled" in await place.reasons()


async def test_a_drain_ends_at_its_deadline(place: Place) -> None:
    async with place.operator():
        await place.create(replicas=1, drainTimeoutSeconds=2)
        await place.until_serving(1)
        place.nodes.worker(f"{NAME}-w-0").open_requests = 1
        await place.scale(0)
        await until(lambda: not place.nodes.pods)
        assert (await place.reasons())[-1] == "DrainTimeout"


async def test_the_last_wish_of_many_holds(place: Place) -> None:
    async with place.operator():
        await place.create(replicas=3)
        await place.until_serving(3)
        for replicas in (1, 4, 2, 0, 5, 1, 4):
            await place.scale(replicas)
            await asyncio.sleep(0.15)
        await place.until_serving(4)


async def test_an_update_takes_one_at_a_time(place: Place) -> None:
    nodes = place.nodes
    async with place.operator():
        await place.create(replicas=3)
        await place.until_serving(3)
        before = {pod["metadata"]["uid"] for pod in nodes.pods.values()}
        nodes.fewest_serving = 3
        await place.patch(image="worker:2")
        await until(lambda: not before & {pod["metadata"]["uid"] for pod in nodes.pods.values()})
        await place.until_serving(3)
        assert nodes.fewest_serving == 2
        images = {pod["spec"]["containers"][0]["image"] for pod in nodes.pods.values()}
        assert images == {"worker:2"}
        await place.until_condition("Progressing", "False")


async def test_a_bad_update_stops_and_a_better_one_goes_on(place: Place) -> None:
    nodes = place.nodes
    nodes.must_load = lambda pod: pod["spec"]["containers"][0]["image"] != "worker:bad"
    async with place.operator():
        await place.create(replicas=3)
        await place.until_serving(3)
        await place.patch(image="worker:bad")
        await until(lambda: len(nodes.serving) == 2 and len(nodes.pods) == 3)
        await asyncio.sleep(2.5)
        assert len(nodes.serving) == 2
        await place.patch(image="worker:2")
        await place.until_serving(3)


async def test_what_fails_or_is_deleted_is_replaced(place: Place) -> None:
    nodes = place.nodes
    async with place.operator():
        await place.create(replicas=2)
        await place.until_serving(2)
        await nodes.fail(f"{NAME}-w-0")
        await until(lambda: f"{NAME}-w-0" not in nodes.pods)
        await place.until_serving(2)
        victim = nodes.pods[nodes.serving[0]]["metadata"]
        await place.api.delete(paths.pod(place.namespace, victim["name"]), victim["uid"])
        await until(lambda: victim["uid"] not in nodes.workers)
        await place.until_serving(2)
        assert "Failed" in await place.reasons()


async def test_another_operator_goes_on_when_the_leader_ends_suddenly(place: Place) -> None:
    nodes = place.nodes
    async with place.operator() as first, place.operator() as second:
        await place.create(replicas=2)
        await place.until_serving(2)
        for worker in nodes.workers.values():
            worker.open_requests = 1
        await place.scale(1)
        await until(lambda: any(worker.is_draining for worker in nodes.workers.values()))
        first.cancel()
        await asyncio.sleep(2 * LEASE_S)
        worker = next(worker for worker in nodes.workers.values() if worker.is_draining)
        num_drains = worker.num_drains
        await until(lambda: worker.num_drains > num_drains)
        worker.open_requests = 0
        await place.until_serving(1)
        assert not second.done()
        created = [reason for reason in await place.reasons() if reason == "Created"]
        assert len(created) == 2


async def test_two_resources_and_two_namespaces(place: Place, api: Api) -> None:
    """Instance ids are unique in a namespace; one operator looks after all of them."""
    async with new_place(api) as elsewhere:
        watched = f"{place.namespace}, {elsewhere.namespace}"
        async with place.operator(namespaces=watched):
            await place.create(replicas=2)
            await place.create("other", replicas=2)
            await elsewhere.create(replicas=1)
            await place.until_serving(4)
            await elsewhere.until_serving(1)
        ids = [pod["metadata"]["labels"]["infinite-llm.io/instance-id"]
               for pod in place.nodes.pods.values()]  # fmt: skip
        assert sorted(ids) == ["0", "1", "2", "3"]
        await place.scale(1)
        async with place.operator(namespaces=""):
            await place.until_serving(3)


async def test_what_the_server_refuses_shows(place: Place) -> None:
    async with place.operator():
        await place.create(podTemplate={"spec": {"restartPolicy": "Sometimes"}})
        await place.until_condition("Degraded", "True")
        degraded = await place.condition("Degraded")
        assert degraded["reason"] == "FailedCreate"
        assert "restartPolicy" in degraded["message"]
        await place.patch(podTemplate=place.spec()["podTemplate"])
        # A merge patch keeps what it does not name.
        await place.patch(podTemplate={"spec": {"restartPolicy": None}})
        await place.until_serving(1)
        await place.until_condition("Degraded", "False")
