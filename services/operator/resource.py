"""What the users ask for: a typed view of one InfiniteLLM object.

The API server has checked the object against its schema and filled in what was left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.common.errors import InvalidRequest

GROUP = "infinite-llm.io"
VERSION = "v1alpha1"
KIND = "InfiniteLLM"
PLURAL = "infinitellms"

#: Any object of the API server, as JSON has it.
Object = dict[str, Any]


class Key(NamedTuple):
    """Which of all resources."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Resource:
    """One InfiniteLLM; `spec` is the part that pods are made from."""

    key: Key
    uid: str
    generation: int
    replicas: int
    max_unavailable: int
    drain_timeout_s: int
    spec: Mapping[str, Any]

    @property
    def gmanager_address(self) -> str:
        """As the pods are told."""
        address: str = self.spec.get("gmanagerAddress", "")
        return address or f"{self.key.name}-gmanager:7000"

    @property
    def selector(self) -> dict[str, str]:
        """The labels that its pods have and nothing else has."""
        return {
            "app.kubernetes.io/name": "infinite-llm",
            "app.kubernetes.io/instance": self.key.name,
            "app.kubernetes.io/component": "worker",
        }


def key_of(resource: Object) -> Key:
    return Key(resource["metadata"]["namespace"], resource["metadata"]["name"])


def condition_of(status: Object, kind: str) -> Object:
    """Of a resource's or a pod's status; empty where it has none of that kind."""
    conditions: list[Object] = status.get("conditions", [])
    return next((c for c in conditions if c.get("type") == kind), {})


def format_selector(selector: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in selector.items())


def parse(resource: Object) -> Resource:
    """Raises InvalidRequest where the object is none that the schema admits."""
    try:
        metadata, spec = resource["metadata"], resource["spec"]
        replicas = int(spec.get("replicas", 1))
        max_unavailable = spec.get("updateStrategy", {}).get("maxUnavailable", 1)
        for required in ("model", "image"):
            _ = spec[required]
        return Resource(
            key_of(resource),
            metadata["uid"],
            metadata["generation"],
            replicas,
            _resolve(max_unavailable, replicas),
            int(spec.get("drainTimeoutSeconds", 60)),
            spec,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"the resource cannot be read: {error!r}") from error


def _resolve(max_unavailable: int | str, replicas: int) -> int:
    """A share is rounded down; an update must be able to go on, so it is at least one."""
    if isinstance(max_unavailable, int):
        return max(1, max_unavailable)
    return max(1, replicas * int(max_unavailable.removesuffix("%")) // 100)
