"""The router's Prometheus metrics. One object, handed to whoever measures."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_PER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "infinite_llm_router_requests",
            "Requests answered, by route and status",
            ["route", "status"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "infinite_llm_router_in_flight", "Requests being served", registry=self.registry
        )
        self.queued = Gauge(
            "infinite_llm_router_queued",
            "Sequences that wait for room in the cluster's memory",
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of admitted prompts")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.retries = self._counter("dispatch_retries", "Requests sent to another instance")
        self.streams_resumed = self._counter(
            "streams_resumed", "Begun streams that another instance went on with"
        )
        self.streams_failed = self._counter(
            "streams_failed", "Begun streams that ended with an error, since nobody could go on"
        )
        self.queue_time = self._histogram(
            "queue_time", "Wait for room in the cluster's memory", _LATENCY_S
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token", "From admission to the first token", _LATENCY_S
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token", "Mean of one sequence after its first token", _PER_TOKEN_S
        )
        self.end_to_end = self._histogram("e2e", "From admission to the last token", _LATENCY_S)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"infinite_llm_router_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"infinite_llm_router_{name}_seconds", text, buckets=buckets, registry=self.registry
        )
