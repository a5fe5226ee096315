"""What the gManager tells Prometheus. Built in `__main__`; counted by server, planner and store."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gmanager.cluster import Instance

_PREFIX = "infinite_llm_gmanager"
_PLAN_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class GManagerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.instances = Gauge(f"{_PREFIX}_instances", "Live instances", registry=registry)
        self.blocks = Gauge(
            f"{_PREFIX}_blocks",
            "Blocks over all instances: free, lent, borrowed",
            ["state"],
            registry=registry,
        )
        self.heartbeats = Counter(f"{_PREFIX}_heartbeats", "Heartbeats received", registry=registry)
        self.moves = Counter(f"{_PREFIX}_moves", "Moves by outcome", ["outcome"], registry=registry)
        self.plan_s = Histogram(
            f"{_PREFIX}_plan_seconds",
            "Time to make one plan",
            buckets=_PLAN_BUCKETS_S,
            registry=registry,
        )
        self.redis_up = Gauge(
            f"{_PREFIX}_redis_up",
            "1 while Redis does what it is used for: map, lease",
            ["use"],
            registry=registry,
        )
        self.leading = Gauge(f"{_PREFIX}_leading", "1 while this one leads", registry=registry)

    def observe(self, instances: Collection[Instance]) -> None:
        loads = [instance.load for instance in instances]
        self.instances.set(len(loads))
        self.blocks.labels("free").set(sum(load.free_blocks for load in loads))
        self.blocks.labels("lent").set(sum(load.lent_blocks for load in loads))
        self.blocks.labels("borrowed").set(sum(load.borrowed_blocks for load in loads))
