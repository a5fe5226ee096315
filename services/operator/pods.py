"""What there is: a typed view of a worker's pod. Pure; called by `reconcile`."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from services.operator.resource import GROUP, Object, condition_of

INSTANCE_ID = f"{GROUP}/instance-id"
TEMPLATE_HASH = f"{GROUP}/template-hash"
#: An annotation: until when a pod that leaves has time. Every later operator goes on with it.
DRAINING = f"{GROUP}/draining"
#: An annotation: how many pods in a row ended soon in this one's place.
FAILURES = f"{GROUP}/failures"

#: From here on it is a loop, also while the next process has not ended yet.
_MANY_RESTARTS = 2

CONTAINER = "worker"
CONTROL_PORT = 7100


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not get on, in Kubernetes' own words."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One worker's pod; times are Unix times."""

    name: str
    uid: str
    inst_id: int
    template_hash: str
    created_at_s: float
    address: str = ""
    """Of the control plane; empty before the pod has an address."""
    is_terminating: bool = False
    is_finished: bool = False
    """It failed or was evicted and will not run again."""
    finished_at_s: float = 0.0
    num_failures: int = 0
    is_running: bool = False
    """There is a process in its container."""
    is_started: bool = False
    """That process has answered once."""
    is_ready: bool = False
    drain_deadline_s: float | None = None
    """Set: the pod is on its way out."""
    trouble: Trouble | None = None

    @property
    def is_live(self) -> bool:
        """It neither ends nor has ended."""
        return not self.is_terminating and not self.is_finished

    @property
    def is_draining(self) -> bool:
        return self.drain_deadline_s is not None


def pod_name(resource_name: str, inst_id: int) -> str:
    return f"{resource_name}-w-{inst_id}"


def inst_id_of(pod: Object) -> int | None:
    text = pod["metadata"].get("labels", {}).get(INSTANCE_ID, "")
    return int(text) if text.isdecimal() else None


def owner_of(pod: Object) -> str | None:
    """The uid of the object that controls it."""
    owners = pod["metadata"].get("ownerReferences", [])
    return next((owner["uid"] for owner in owners if owner.get("controller")), None)


def parse(pod: Object) -> Pod | None:
    """None: a pod without an instance id is none of ours, whatever else it says."""
    inst_id = inst_id_of(pod)
    if inst_id is None:
        return None
    metadata, status = pod["metadata"], pod.get("status", {})
    annotations = metadata.get("annotations", {})
    container = _container_status(status)
    running = container.get("state", {}).get("running")
    is_finished = status.get("phase") in ("Failed", "Succeeded")
    address = status.get("podIP", "")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        inst_id=inst_id,
        template_hash=metadata["labels"].get(TEMPLATE_HASH, ""),
        created_at_s=parse_time(metadata["creationTimestamp"]),
        address=_host_port(address) if address else "",
        is_terminating="deletionTimestamp" in metadata,
        is_finished=is_finished,
        finished_at_s=_finished_at_s(metadata, status, container) if is_finished else 0.0,
        num_failures=_count(annotations.get(FAILURES, "")),
        is_running=running is not None and not is_finished,
        is_started=bool(container.get("started")),
        is_ready=_is_ready(status) and not is_finished,
        drain_deadline_s=_deadline_s(annotations.get(DRAINING)),
        trouble=_trouble(status, container),
    )


def parse_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def format_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _host_port(ip: str) -> str:
    return f"[{ip}]:{CONTROL_PORT}" if ":" in ip else f"{ip}:{CONTROL_PORT}"


def _container_status(status: Object) -> Object:
    statuses = status.get("containerStatuses", [])
    return next((s for s in statuses if s.get("name") == CONTAINER), {})


def _is_ready(status: Object) -> bool:
    return condition_of(status, "Ready").get("status") == "True"


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _deadline_s(text: str | None) -> float | None:
    """A mark that cannot be read is a mark all the same; its time is over."""
    if text is None:
        return None
    try:
        return parse_time(text)
    except ValueError:
        return 0.0


def _finished_at_s(metadata: Object, status: Object, container: Object) -> float:
    """The latest time that anything says about it."""
    ended = container.get("state", {}).get("terminated", {}).get("finishedAt")
    changes = [c.get("lastTransitionTime") for c in status.get("conditions", [])]
    times = [metadata["creationTimestamp"], ended, *changes]
    return max(parse_time(text) for text in times if text)


def _trouble(status: Object, container: Object) -> Trouble | None:
    ended: Object = container.get("lastState", {}).get("terminated", {})
    if ended and not container.get("ready") and container.get("restartCount", 0) >= _MANY_RESTARTS:
        message = f"ended with {ended.get('exitCode')}, {container['restartCount']} restarts"
        return Trouble("CrashLoopBackOff", message)
    waiting: dict[str, Any] = container.get("state", {}).get("waiting", {})
    reason = waiting.get("reason", "")
    if reason not in ("", "ContainerCreating", "PodInitializing"):
        return Trouble(reason, waiting.get("message", ""))
    scheduled = condition_of(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return Trouble(scheduled.get("reason", "Unscheduled"), scheduled.get("message", ""))
    if status.get("phase") == "Failed":
        return Trouble(status.get("reason", "Failed"), status.get("message", ""))
    return None
