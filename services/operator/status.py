"""What the resource's status says, from what there is. Pure; called by `reconcile`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.operator.pods import Pod, Trouble, format_time
from services.operator.resource import Object, Resource, format_selector


@dataclass(frozen=True, slots=True)
class Counts:
    """Of the live pods."""

    live: int
    ready: int
    draining: int
    updated: int
    updated_ready: int

    @classmethod
    def of(cls, pods: Sequence[Pod], template_hash: str) -> "Counts":
        live = [pod for pod in pods if pod.is_live]
        ready = [pod for pod in live if pod.is_ready and not pod.is_draining]
        updated = [pod for pod in live if pod.template_hash == template_hash]
        return cls(
            live=len(live),
            ready=len(ready),
            draining=sum(pod.is_draining for pod in live),
            updated=len(updated),
            updated_ready=sum(pod in updated for pod in ready),
        )


class Condition(NamedTuple):
    kind: str
    is_true: bool
    reason: str
    message: str


def make_status(
    resource: Resource,
    pods: Sequence[Pod],
    counts: Counts,
    trouble: Trouble | None,
    before: Object,
    now_s: float,
) -> Object:
    """`trouble`: what the operator itself met with. `before`: the status so far."""
    found = [
        _available(resource, counts),
        _progressing(resource, counts),
        _degraded(pods, trouble),
        _draining(pods),
        _ready(resource, counts),
    ]
    return {
        "observedGeneration": resource.generation,
        "replicas": counts.live,
        "readyReplicas": counts.ready,
        "drainingReplicas": counts.draining,
        "updatedReplicas": counts.updated,
        "selector": format_selector(resource.selector),
        "conditions": merge_conditions(found, before, resource.generation, now_s),
    }


def merge_conditions(
    found: Sequence[Condition], before: Object, generation: int, now_s: float
) -> list[Object]:
    """A condition that is as it was keeps the time since which it is so."""
    earlier = {condition["type"]: condition for condition in before.get("conditions", [])}
    merged = []
    for condition in found:
        status = "True" if condition.is_true else "False"
        was = earlier.get(condition.kind, {})
        is_same = was.get("status") == status
        merged.append(
            {
                "type": condition.kind,
                "status": status,
                "reason": condition.reason,
                "message": condition.message,
                "lastTransitionTime": was["lastTransitionTime"] if is_same else format_time(now_s),
                "observedGeneration": generation,
            }
        )
    return merged


def _available(resource: Resource, counts: Counts) -> Condition:
    wanted = resource.replicas
    least = max(1, wanted - resource.max_unavailable) if wanted else 0
    is_available = counts.ready >= least
    reason = "EnoughReplicasReady" if is_available else "TooFewReplicasReady"
    return Condition("Available", is_available, reason, _of(counts.ready, wanted, "ready"))


def _ready(resource: Resource, counts: Counts) -> Condition:
    """What `helm install --wait` and `kubectl wait` go by: all of it, and as it should be."""
    wanted = resource.replicas
    is_ready = counts.live == counts.updated_ready == wanted
    reason = "AllReplicasReady" if is_ready else "NotAllReplicasReady"
    message = _of(counts.updated_ready, wanted, "up to date and ready")
    return Condition("Ready", is_ready, reason, message)


def _progressing(resource: Resource, counts: Counts) -> Condition:
    wanted = resource.replicas
    if counts.live > wanted:
        return Condition("Progressing", True, "ScalingDown", f"{counts.live} -> {wanted} replicas")
    if counts.updated < counts.live:
        updated = _of(counts.updated, wanted, "up to date")
        return Condition("Progressing", True, "RollingUpdate", updated)
    if counts.live < wanted:
        return Condition("Progressing", True, "ScalingUp", f"{counts.live} -> {wanted} replicas")
    if counts.ready < wanted:
        ready = _of(counts.ready, wanted, "ready")
        return Condition("Progressing", True, "WaitingForPods", ready)
    return Condition("Progressing", False, "Complete", _of(counts.ready, wanted, "ready"))


def _degraded(pods: Sequence[Pod], trouble: Trouble | None) -> Condition:
    if trouble is not None:
        return Condition("Degraded", True, trouble.reason, trouble.message[:1000])
    for pod in sorted(pods, key=lambda pod: pod.inst_id):
        if pod.trouble is not None and not pod.is_terminating:
            reason = _REASONS.get(pod.trouble.reason, pod.trouble.reason)
            return Condition("Degraded", True, reason, f"{pod.name}: {pod.trouble.message}"[:1000])
    return Condition("Degraded", False, "AsExpected", "")


#: Kubernetes goes back and forth between two names of one thing.
_REASONS = {
    "CrashLoopBackOff": "CrashLoop",
    "ErrImagePull": "ImagePull",
    "ImagePullBackOff": "ImagePull",
}


def _draining(pods: Sequence[Pod]) -> Condition:
    leaving = sorted(
        f"{pod.name} until {format_time(pod.drain_deadline_s)}"
        for pod in pods
        if pod.drain_deadline_s is not None and not pod.is_terminating
    )
    reason = "PodsDraining" if leaving else "NoneDraining"
    return Condition("Draining", bool(leaving), reason, ", ".join(leaving)[:1000])


def _of(count: int, wanted: int, what: str) -> str:
    return f"{count} of {wanted} replicas {what}"
