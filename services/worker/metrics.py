"""Prometheus metrics of a worker, read from its snapshots at scrape time."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.engine.engine import Engine
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.lender import Lender
from services.worker.rmanager.mover import Mover
from services.worker.rmanager.retriever import Retriever


class WorkerCollector(Collector):
    def __init__(
        self, engine: Engine, pool: BlockPool, lender: Lender, mover: Mover, retriever: Retriever
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._lender = lender
        self._mover = mover
        self._retriever = retriever

    def collect(self) -> Iterator[Metric]:
        snapshot = self._engine.snapshot
        lent = self._lender.num_lent_blocks
        blocks = GaugeMetricFamily(
            "infinite_llm_worker_kv_blocks", "KV blocks of this instance by use", labels=["use"]
        )
        own = self._pool.num_blocks - self._pool.num_free - lent
        free, cached = self._pool.num_free, self._pool.num_cached
        uses = {"free": free - cached, "cached": cached, "own": own, "lent": lent}
        for use, count in uses.items():
            blocks.add_metric([use], count)
        yield blocks
        yield GaugeMetricFamily(
            "infinite_llm_worker_kv_cache_usage",
            "Share of the KV blocks that are neither free nor cached",
            value=(own + lent) / self._pool.num_blocks,
        )
        gauges = {
            "kv_blocks_borrowed": (snapshot.borrowed_blocks, "Blocks that others hold for us"),
            "requests_running": (snapshot.num_running, "Requests in the batch"),
            "requests_waiting": (snapshot.num_waiting, "Requests in the queue"),
            "step_seconds": (snapshot.step_s, "Duration of the last step"),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"infinite_llm_worker_{name}", text, value=value)
        counters = {
            "generated_tokens": (snapshot.generated_tokens, "Tokens sampled"),
            "steps": (snapshot.steps, "Steps run"),
            "prefix_cache_asked_tokens": (snapshot.cache_asked_tokens, "Prompt tokens looked up"),
            "prefix_cache_hit_tokens": (snapshot.cache_hit_tokens, "Prompt tokens found computed"),
            "preemptions": (snapshot.preemptions, "Sequences that gave their blocks up"),
            "moved_blocks": (self._mover.moved_blocks, "Blocks moved to creditors"),
            "failed_moves": (self._mover.failed_moves, "Moves refused, failed or void"),
            "taken_back_blocks": (
                self._retriever.taken_back_blocks,
                "Blocks fetched from creditors that wanted their memory back",
            ),
            "lent_on_blocks": (
                self._retriever.lent_on_blocks,
                "Blocks moved from such creditors to others",
            ),
            "recomputed": (snapshot.recomputed, "Sequences that lost a part on a creditor"),
            "recomputed_tokens": (snapshot.recomputed_tokens, "Lost tokens computed again"),
        }
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"infinite_llm_worker_{name}", text, value=value)
