"""Objects as the API server has them, with what a test does not care about filled in."""

from typing import Any

from services.operator.plan import Wanted
from services.operator.pods import Pod, format_time
from services.operator.resource import Object, Resource, parse

NAMESPACE = "serving"
NAME = "small"
NOW_S = 1_800_000_000.0
WANTED = Wanted(replicas=3, max_unavailable=1, drain_timeout_s=60.0, template_hash="new")


def resource_object(name: str = NAME, namespace: str = NAMESPACE, **spec: Any) -> Object:
    return {
        "apiVersion": "infinite-llm.io/v1alpha1",
        "kind": "InfiniteLLM",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "generation": 1,
        },
        "spec": {"model": "m", "image": "worker:1", **spec},
    }


def resource(**spec: Any) -> Resource:
    return parse(resource_object(**spec))


def pod(inst_id: int, **changes: Any) -> Pod:
    """One that serves."""
    name = f"{NAME}-w-{inst_id}"
    serving: dict[str, Any] = {
        "template_hash": "new",
        "created_at_s": NOW_S - 1000 + inst_id,
        "address": f"{name}:7100",
        "is_running": True,
        "is_started": True,
        "is_ready": True,
    }
    return Pod(name, f"uid-{name}", inst_id, **(serving | changes))


def pod_status(is_ready: bool = True, **container: Any) -> Object:
    """Of a pod that runs."""
    state = {"running": {"startedAt": format_time(NOW_S)}}
    worker = {"name": "worker", "state": state, "started": True, "ready": is_ready}
    return {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": str(is_ready)}],
        "containerStatuses": [worker | container],
    }
