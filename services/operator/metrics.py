"""What the operator tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.operator.resource import Key
from services.operator.status import Counts

_PREFIX = "infinite_llm_operator"
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class OperatorMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.leading = Gauge(f"{_PREFIX}_leading", "1 while this one leads", registry=registry)
        self.reconciles = Counter(
            f"{_PREFIX}_reconciles",
            "Looks at a resource by outcome: ok, failed",
            ["outcome"],
            registry=registry,
        )
        self.reconcile_s = Histogram(
            f"{_PREFIX}_reconcile_seconds",
            "Time of one look at a resource",
            buckets=_BUCKETS_S,
            registry=registry,
        )
        self.actions = Counter(
            f"{_PREFIX}_actions",
            "What was done, by the reason of its event",
            ["reason"],
            registry=registry,
        )
        self.replicas = Gauge(
            f"{_PREFIX}_replicas",
            "Replicas of a resource by state: desired, live, ready, draining, updated",
            ["resource_namespace", "resource", "state"],
            registry=registry,
        )

    def observe(self, key: Key, desired: int, counts: Counts) -> None:
        values = {
            "desired": desired,
            "live": counts.live,
            "ready": counts.ready,
            "draining": counts.draining,
            "updated": counts.updated,
        }
        for state, value in values.items():
            self.replicas.labels(*key, state).set(value)

    def forget(self, key: Key) -> None:
        self.replicas.remove_by_labels({"resource_namespace": key.namespace, "resource": key.name})

    def rest(self) -> None:
        """Another operator leads: what this one saw last is not so any more."""
        self.leading.set(0)
        self.replicas.clear()
