"""What is read from a pod, and what a resource's status says of pods."""

from typing import Any

import pytest

from services.common.errors import InvalidRequest
from services.operator import resource as resources
from services.operator.pod_template import worker_pod
from services.operator.pods import DRAINING, Pod, Trouble, format_time, owner_of, parse
from services.operator.resource import Object
from services.operator.status import Counts, make_status
from tests.unit.operator.builders import NOW_S, pod, pod_status, resource, resource_object


def observed(status: Object, **metadata: Any) -> Pod:
    made = worker_pod(resource(), 2)
    made["metadata"] |= {"uid": "u", "creationTimestamp": format_time(NOW_S - 60)} | metadata
    found = parse(made | {"status": status})
    assert found is not None
    return found


def test_a_pod_that_serves() -> None:
    found = observed(pod_status())
    assert (found.inst_id, found.address) == (2, "10.0.0.1:7100")
    assert found.is_running and found.is_started and found.is_ready
    assert not (found.is_finished or found.is_terminating or found.is_draining or found.trouble)


def test_a_pod_that_leaves() -> None:
    found = observed(pod_status(), annotations={DRAINING: format_time(NOW_S)})
    assert found.drain_deadline_s == NOW_S
    assert observed(pod_status(), annotations={DRAINING: "soon"}).drain_deadline_s == 0.0


def test_a_pod_that_was_evicted() -> None:
    status = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "no memory",
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": format_time(NOW_S)}
        ],
    }
    found = observed(status)
    assert found.is_finished and not found.is_ready and not found.is_running
    assert found.finished_at_s == NOW_S
    assert found.trouble == Trouble("Evicted", "no memory")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (pod_status(state={"waiting": {"reason": "ErrImagePull"}}), "ErrImagePull"),
        (pod_status(state={"waiting": {"reason": "ContainerCreating"}}), None),
        (pod_status(False, restartCount=3, lastState={"terminated": {"exitCode": 1}}),
         "CrashLoopBackOff"),
        (pod_status(restartCount=3, lastState={"terminated": {"exitCode": 1}}), None),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
         "Unschedulable"),
        ({}, None),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_pod(status: Object, reason: str | None) -> None:
    trouble = observed(status).trouble
    assert (trouble and trouble.reason) == reason


def test_whose_pod_it_is() -> None:
    made = worker_pod(resource(), 0)
    assert owner_of(made) == "uid-small"
    made["metadata"]["ownerReferences"][0]["controller"] = False
    assert owner_of(made) is None


def test_a_pod_without_an_instance_id_is_none_of_ours() -> None:
    assert parse({"metadata": {"name": "x"}}) is None


# -- resources -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_unavailable", "replicas", "resolved"),
    [(1, 10, 1), (3, 2, 3), ("25%", 10, 2), ("10%", 3, 1), ("100%", 4, 4), ("50%", 0, 1)],
)
def test_how_many_may_be_away(max_unavailable: Any, replicas: int, resolved: int) -> None:
    strategy = {"maxUnavailable": max_unavailable}
    found = resource(replicas=replicas, updateStrategy=strategy)
    assert found.max_unavailable == resolved


@pytest.mark.parametrize("spec", [None, {}, {"model": "m"}, {"replicas": "x"}])
def test_an_object_that_the_schema_would_refuse_is_refused(spec: Any) -> None:
    with pytest.raises(InvalidRequest):
        resources.parse(resource_object() | {"spec": spec})


# -- status ----------------------------------------------------------------------------------------


def conditions_of(status: Object) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}


def status_of(pods: list[Pod], replicas: int, before: Object | None = None, **more: Any) -> Object:
    now_s = more.get("now_s", NOW_S)
    counts = Counts.of(pods, "new")
    return make_status(
        resource(replicas=replicas), pods, counts, more.get("trouble"), before or {}, now_s
    )


def test_at_rest() -> None:
    status = status_of([pod(0), pod(1)], 2)
    assert conditions_of(status) == {
        "Available": ("True", "EnoughReplicasReady"),
        "Progressing": ("False", "Complete"),
        "Degraded": ("False", "AsExpected"),
        "Draining": ("False", "NoneDraining"),
        "Ready": ("True", "AllReplicasReady"),
    }
    assert status["selector"].count("=") == 3
    assert status["observedGeneration"] == 1


def test_while_pods_leave() -> None:
    leaver = pod(1, drain_deadline_s=NOW_S, is_ready=True)
    status = status_of([pod(0), leaver, pod(2, is_terminating=True)], 1)
    assert (status["replicas"], status["readyReplicas"], status["drainingReplicas"]) == (2, 1, 1)
    conditions = conditions_of(status)
    assert conditions["Progressing"] == ("True", "ScalingDown")
    assert conditions["Draining"] == ("True", "PodsDraining")
    assert conditions["Ready"] == ("False", "NotAllReplicasReady")


def test_while_an_update_is_under_way() -> None:
    status = status_of([pod(0), pod(1, template_hash="old")], 2)
    assert status["updatedReplicas"] == 1
    assert conditions_of(status)["Progressing"] == ("True", "RollingUpdate")


def test_the_pods_trouble_is_the_resources() -> None:
    crashing = pod(0, is_ready=False, trouble=Trouble("CrashLoopBackOff", "again"))
    conditions = conditions_of(status_of([crashing], 1))
    assert conditions["Degraded"] == ("True", "CrashLoop")
    assert conditions["Available"] == ("False", "TooFewReplicasReady")
    refused = status_of([pod(0)], 1, trouble=Trouble("FailedCreate", "quota"))
    assert conditions_of(refused)["Degraded"] == ("True", "FailedCreate")


def test_a_condition_keeps_the_time_since_which_it_holds() -> None:
    first = status_of([pod(0)], 1)
    later = status_of([pod(0)], 1, first, now_s=NOW_S + 60)
    assert later == first
    changed = status_of([pod(0)], 2, first, now_s=NOW_S + 60)
    times = {c["type"]: c["lastTransitionTime"] for c in changed["conditions"]}
    assert times["Available"] == format_time(NOW_S)
    assert times["Ready"] == format_time(NOW_S + 60)


def test_none_wanted_and_none_there_is_well() -> None:
    conditions = conditions_of(status_of([], 0))
    assert conditions["Available"][0] == conditions["Ready"][0] == "True"
