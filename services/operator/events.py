"""Tells people what is done and why, as Events of the resource. Called by `reconcile`."""

import logging
from typing import NamedTuple

from services.operator import paths
from services.operator.api import Api, ApiError
from services.operator.plan import Action, CancelDrain, Create, Delete, End, StartDrain, Why
from services.operator.pods import format_time, pod_name
from services.operator.resource import GROUP, KIND, VERSION, Resource

_log = logging.getLogger(__name__)

_COMPONENT = "infinite-llm-operator"


class News(NamedTuple):
    reason: str
    message: str
    is_warning: bool = False


def news_of(resource: Resource, action: Action) -> News | None:
    match action:
        case Create(inst_id, num_failures):
            again = f", after {num_failures} failed in its place" if num_failures else ""
            return News("Created", f"made {pod_name(resource.key.name, inst_id)}{again}")
        case StartDrain(pod, deadline_s, why):
            reason = "RollingUpdate" if why is Why.UPDATE else "Draining"
            return News(reason, f"{pod.name} leaves until {format_time(deadline_s)}: {why}")
        case CancelDrain(pod):
            # A drain whose mark was lost is ended without a word.
            return News("DrainCancelled", f"{pod.name} stays") if pod.is_draining else None
        case Delete(pod, End.DRAINED):
            return News("Drained", f"deleted {pod.name}: nobody needs it any more")
        case Delete(pod, End.TIMEOUT):
            return News("DrainTimeout", f"deleted {pod.name}: its time to drain is over", True)
        case Delete(pod, End.FINISHED):
            why_failed = f"{pod.trouble.reason} {pod.trouble.message}" if pod.trouble else ""
            return News("Failed", f"deleted {pod.name}, which ended: {why_failed}", True)
        case Delete(pod, _):
            return News("Deleted", f"deleted {pod.name}, which was not in use")


async def publish(api: Api, resource: Resource, news: News, now_s: float) -> None:
    """Nothing depends on it: a failure is only logged."""
    namespace, name = resource.key
    time = format_time(now_s)
    level = logging.WARNING if news.is_warning else logging.INFO
    _log.log(level, news.message, extra={"resource": f"{namespace}/{name}", "reason": news.reason})
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{name}.", "namespace": namespace},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "uid": resource.uid,
        },
        "type": "Warning" if news.is_warning else "Normal",
        "reason": news.reason,
        "message": news.message[:1000],
        "source": {"component": _COMPONENT},
        "reportingComponent": _COMPONENT,
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
    try:
        await api.create(paths.events(namespace), event)
    except ApiError as error:
        _log.warning("an event was not kept", extra={"reason": error.message})
