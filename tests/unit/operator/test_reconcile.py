"""One look after the other: what is read, done and told, whatever the server does meanwhile."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.operator import paths
from services.operator.api import ApiError
from services.operator.plan import Load
from services.operator.pods import DRAINING
from tests.unit.operator.builders import NAMESPACE, resource_object
from tests.unit.operator.rig import KEY, Rig


def condition(rig: Rig, kind: str) -> Any:
    return next(c for c in rig.status["conditions"] if c["type"] == kind)


async def test_pods_are_made_and_the_status_says_so() -> None:
    rig = Rig(replicas=3)
    await rig.settle()
    await rig.look()
    assert sorted(rig.pods) == ["small-w-0", "small-w-1", "small-w-2"]
    assert (rig.status["replicas"], rig.status["readyReplicas"]) == (3, 3)
    assert condition(rig, "Ready")["status"] == "True"
    assert rig.reasons == ["Created"] * 3


async def test_when_all_is_well_nothing_is_written() -> None:
    rig = Rig(replicas=2)
    await rig.settle()
    await rig.look()
    rig.api.calls.clear()
    await rig.look()
    assert {method for method, _ in rig.api.calls} == {"GET", "LIST"}


async def test_who_leaves_is_marked_told_and_deleted_once_nobody_needs_it() -> None:
    rig = Rig(replicas=2)
    await rig.settle()
    rig.workers.busy = {"10.0.0.1:7100"}
    rig.views.known = {"10.0.0.0:7100": Load(num_requests=5), "10.0.0.1:7100": Load()}
    rig.write(replicas=1)
    looked = await rig.look()
    assert looked.again_in_s == 1.0
    assert DRAINING in rig.pods["small-w-1"]["metadata"]["annotations"]
    assert rig.workers.draining == {"10.0.0.1:7100"}
    await rig.look()
    assert condition(rig, "Draining")["status"] == "True"
    rig.workers.busy.clear()
    await rig.look()
    assert "deletionTimestamp" in rig.pods["small-w-1"]["metadata"]
    assert rig.reasons[-2:] == ["Draining", "Drained"]


async def test_another_operator_goes_on_with_a_drain_and_its_deadline() -> None:
    rig = Rig(replicas=1, drainTimeoutSeconds=60)
    await rig.settle()
    rig.workers.busy = {"10.0.0.0:7100"}
    rig.write(replicas=0)
    await rig.look()
    rig.restart()
    rig.workers.draining.clear()  # so is the worker's process
    rig.now_s += 59
    await rig.look()
    assert rig.workers.draining == {"10.0.0.0:7100"}
    rig.now_s += 1
    await rig.look()
    assert rig.reasons[-1] == "DrainTimeout"


async def test_a_drain_is_called_back_only_when_the_worker_knows() -> None:
    rig = Rig(replicas=1)
    await rig.settle()
    rig.workers.busy = rig.workers.deaf = {"10.0.0.0:7100"}
    rig.write(replicas=0)
    await rig.look()
    rig.write(replicas=1)
    await rig.look()
    assert DRAINING in rig.pods["small-w-0"]["metadata"]["annotations"]
    rig.workers.deaf = set()
    await rig.look()
    assert rig.pods["small-w-0"]["metadata"]["annotations"] == {}
    assert rig.reasons[-1] == "DrainCancelled"


async def test_two_resources_in_a_namespace_share_no_instance_id_and_no_pod() -> None:
    rig = Rig(replicas=2)
    await rig.settle()
    other = KEY._replace(name="other")
    rig.api.put(paths.resource(other), resource_object("other", replicas=2))
    await rig.reconciler.look_at(other)
    await rig.settle()
    assert sorted(rig.pods) == ["other-w-2", "other-w-3", "small-w-0", "small-w-1"]


async def test_resources_that_are_looked_at_at_once_share_no_instance_id() -> None:
    rig = Rig(replicas=2)
    other = KEY._replace(name="other")
    rig.api.put(paths.resource(other), resource_object("other", replicas=2))
    looks = (rig.reconciler.look_at(key) for key in (other, KEY))
    await asyncio.gather(*looks)
    ids = [name.rpartition("-")[2] for name in rig.pods]
    assert sorted(ids) == ["0", "1", "2", "3"]


async def test_a_pod_of_the_same_name_that_is_not_ours_is_left_alone() -> None:
    rig = Rig(replicas=1)
    foreign = {"metadata": {"name": "small-w-0", "uid": "x"}, "status": {"podIP": "10.9.9.9"}}
    rig.api.put(paths.pod(NAMESPACE, "small-w-0"), foreign)
    assert (await rig.look()).has_failed
    await rig.settle()
    assert sorted(rig.pods) == ["small-w-0", "small-w-1"]
    assert rig.pods["small-w-0"]["metadata"]["uid"] == "x"


async def test_what_the_server_refuses_shows_in_the_status() -> None:
    rig = Rig(replicas=2)

    def refuse(method: str, path: str) -> None:
        if method == "POST" and path.endswith("/pods"):
            raise ApiError(403, "exceeded quota")

    rig.api.fault_before = refuse
    for _ in range(2):
        assert (await rig.look()).has_failed
    degraded = condition(rig, "Degraded")
    assert (degraded["reason"], degraded["message"]) == ("FailedCreate", "exceeded quota")
    assert rig.reasons == ["FailedCreate"]


async def test_an_object_that_cannot_be_read_shows_in_the_status() -> None:
    rig = Rig(replicas="many")
    await rig.look()
    assert condition(rig, "Degraded")["reason"] == "InvalidSpec"
    assert not rig.pods


async def test_who_leads_no_more_does_nothing() -> None:
    rig = Rig(replicas=2)
    rig.is_leader = False
    await rig.look()
    assert not rig.pods and not rig.status


async def test_a_resource_that_is_deleted_is_left_to_the_garbage_collector() -> None:
    rig = Rig(replicas=1)
    await rig.settle()
    rig.api.edit(paths.resource(KEY), lambda body: body["metadata"].update(deletionTimestamp="now"))
    rig.api.remove(paths.pod(NAMESPACE, "small-w-0"))
    assert not (await rig.look()).is_gone
    assert not rig.pods
    rig.api.remove(paths.resource(KEY))
    assert (await rig.look()).is_gone


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sets(st.integers(0, 60), max_size=12),
    st.sets(st.integers(0, 60), max_size=12),
    st.booleans(),
)
def test_it_ends_right_whatever_calls_fail_and_whenever_it_is_restarted(
    scales: list[int], lost_calls: set[int], lost_answers: set[int], is_restarted: bool
) -> None:
    """Calls that were never made, and calls that were made but never answered."""

    async def run() -> None:
        rig = Rig(replicas=scales[0])
        counts = {"before": 0, "after": 0}

        def fail(when: str, at: set[int]) -> None:
            counts[when] += 1
            if counts[when] in at:
                if is_restarted:
                    rig.restart()
                raise ApiError(0, "nobody answers")

        rig.api.fault_before = lambda *_: fail("before", lost_calls)
        rig.api.fault_after = lambda *_: fail("after", lost_answers)
        for replicas in scales:
            rig.write(replicas=replicas, image=f"worker:{replicas}")
            for _ in range(3):
                try:
                    await rig.look()
                except ApiError:
                    continue
                rig.run_pods()
        await rig.settle(200)
        assert len(rig.pods) == scales[-1]
        assert not rig.workers.draining
        images = {pod["spec"]["containers"][0]["image"] for pod in rig.pods.values()}
        assert images <= {f"worker:{scales[-1]}"}

    asyncio.run(run())
