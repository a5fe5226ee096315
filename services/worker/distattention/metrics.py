"""Counters of the data plane. Made once per process by whoever owns the registry."""

from prometheus_client import CollectorRegistry, Counter

_LABELS = ("side",)


class SideMetrics:
    """What one side (debtor or creditor) counts; each call costs a few microseconds."""

    def __init__(self, counters: dict[str, Counter], side: str) -> None:
        self._queries = counters["queries"].labels(side)
        self._rows = counters["rows"].labels(side)
        self._query_bytes = counters["query_bytes"].labels(side)
        self._query_seconds = counters["query_seconds"].labels(side)
        self._blocks = counters["blocks"].labels(side)
        self._block_bytes = counters["block_bytes"].labels(side)
        self._block_seconds = counters["block_seconds"].labels(side)
        self._failures = counters["failures"].labels(side)

    def record_queries(
        self, num_queries: int, num_rows: int, num_bytes: int, duration_s: float
    ) -> None:
        """Rows and bytes are those of each, query and partial. The debtor's time is what it waited,
        the creditor's what it took from the query to the partial."""
        self._queries.inc(num_queries)
        self._rows.inc(num_queries * num_rows)
        self._query_bytes.inc(num_queries * num_bytes)
        self._query_seconds.inc(duration_s)

    def record_blocks(self, num_blocks: int, num_bytes: int, duration_s: float) -> None:
        self._blocks.inc(num_blocks)
        self._block_bytes.inc(num_bytes)
        self._block_seconds.inc(duration_s)

    def record_failure(self) -> None:
        self._failures.inc()


class DataPlaneMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"infinite_llm_{name}", text, _LABELS, registry=registry)

        counters = {
            "queries": counter("remote_queries", "Attention queries, one per layer and creditor."),
            "rows": counter("remote_query_rows", "Query rows in them."),
            "query_bytes": counter("remote_query_bytes", "Bytes of queries and partials."),
            "query_seconds": counter("remote_query_seconds", "Seconds spent on them."),
            "blocks": counter("blocks_copied", "Blocks copied and verified, there or back."),
            "block_bytes": counter("blocks_copied_bytes", "Bytes of them."),
            "block_seconds": counter("blocks_copied_seconds", "Seconds spent on them."),
            "failures": counter("data_plane_failures", "Connections that ended in an error."),
        }
        self.debtor = SideMetrics(counters, "debtor")
        self.creditor = SideMetrics(counters, "creditor")
