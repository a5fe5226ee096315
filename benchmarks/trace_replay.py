"""Lets the users of a trace loose on whole clusters: pooled, static, and dealt out in turn.

Static is the same cluster with pooling off: every instance on its own, behind a router that knows
how full each is. Dealt out in turn, that cluster is engines that know nothing of each other.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from statistics import median

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.doors import Ask, the_router, workers_in_turn
from benchmarks.mixed_traces import Trace
from benchmarks.running_cluster import running_cluster
from services.local.cluster import LocalCluster
from services.local.plan import HOST, ClusterSpec

#: Batches are full and the first long requests have been computed.
_WARMUP_S = 8.0
#: What was given back shows in the router's view, and nobody lends or borrows.
_PAUSE_S = 2.0
Door = Callable[[LocalCluster, str], AbstractAsyncContextManager[Ask]]
_COUNTED = ("generated_tokens", "steps", "moved_blocks", "preemptions")


@dataclass(frozen=True, slots=True)
class Counts:
    """What one instance did in the time that is measured."""

    generated_tokens: float
    steps: float
    moved_blocks: float
    preemptions: float

    @property
    def batch(self) -> float:
        """Tokens of a step, on average: smaller than the batch where steps prefill alone."""
        return self.generated_tokens / max(1.0, self.steps)


@dataclass(frozen=True, slots=True)
class Replay:
    instances: tuple[Counts, ...]
    duration_s: float
    num_long_served: int

    @property
    def tokens_per_s(self) -> float:
        """Generated for everybody, those included whose answers are not whole yet."""
        return sum(counts.generated_tokens for counts in self.instances) / self.duration_s

    def describe(self) -> str:
        batches = " + ".join(f"{counts.batch:.1f}" for counts in self.instances)
        num_moved = sum(counts.moved_blocks for counts in self.instances)
        num_preempted = sum(counts.preemptions for counts in self.instances)
        return (
            f"{self.tokens_per_s:.1f} tokens/s, batches {batches}, {num_moved:.0f} blocks moved, "
            f"{num_preempted:.0f} preempted, {self.num_long_served} long requests served"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace, as often on each."""

    pooled: tuple[Replay, ...]
    static: tuple[Replay, ...]
    in_turn: tuple[Replay, ...]

    @property
    def over_static(self) -> float:
        return _median(self.pooled) / _median(self.static)

    @property
    def over_in_turn(self) -> float:
        return _median(self.pooled) / _median(self.in_turn)


def _median(replays: Sequence[Replay]) -> float:
    return median(replay.tokens_per_s for replay in replays)


async def compare(
    spec: ClusterSpec,
    traces: Sequence[Trace],
    num_repeats: int,
    window_s: float,
    say: Callable[[str], None],
) -> dict[str, Comparison]:
    """The clusters are up all the time and take turns: what else the machine does hits all."""
    comparisons = {}
    async with (
        running_cluster(replace(spec, pooling=True)) as pooled,
        running_cluster(replace(spec, pooling=False)) as static,
    ):
        sides: dict[str, tuple[LocalCluster, Door]] = {
            "pooled": (pooled, the_router),
            "static": (static, the_router),
            "in_turn": (static, workers_in_turn),
        }
        for trace in traces:
            replays: dict[str, list[Replay]] = {side: [] for side in sides}
            # A, B, C, C, B, A, ...: nobody has the better turns.
            for turn in range(num_repeats):
                for side in list(sides)[:: -1 if turn % 2 else 1]:
                    cluster, door = sides[side]
                    # Other prompts each time: nothing is found in a cache, by anybody.
                    async with door(cluster, f"{trace.name} {turn} {side}") as ask:
                        done = await replay(cluster, trace, window_s, ask)
                    replays[side].append(done)
                    say(f"{trace.name}, {side}: {done.describe()}")
                    await asyncio.sleep(_PAUSE_S)
            comparisons[trace.name] = Comparison(**{s: tuple(r) for s, r in replays.items()})
    return comparisons


async def replay(cluster: LocalCluster, trace: Trace, window_s: float, ask: Ask) -> Replay:
    """What the cluster does in `window_s`, once all users are there."""
    num_long_served = 0

    async def use(user: int) -> None:
        nonlocal num_long_served
        for job in trace.jobs_of(user):
            is_served = await ask(job)
            num_long_served += is_served and user < trace.num_long_users

    users = [asyncio.create_task(use(user)) for user in range(trace.num_users)]
    try:
        await asyncio.sleep(_WARMUP_S)
        before, started_s = await _counts(cluster), time.monotonic()
        await asyncio.sleep(window_s)
        after, ended_s = await _counts(cluster), time.monotonic()
    finally:
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    instances = tuple(
        Counts(*(new - old for new, old in zip(news, olds, strict=True)))
        for news, olds in zip(after, before, strict=True)
    )
    return Replay(instances, ended_s - started_s, num_long_served)


async def _counts(cluster: LocalCluster) -> list[list[float]]:
    """By instance, in the order of `_COUNTED`."""
    async with httpx.AsyncClient(trust_env=False) as client:
        return [
            await _counts_of(client, f"http://{HOST}:{port}/metrics")
            for port in cluster.ports.worker_metrics
        ]


async def _counts_of(client: httpx.AsyncClient, url: str) -> list[float]:
    text = (await client.get(url)).text
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    return [values[f"infinite_llm_worker_{name}_total"] for name in _COUNTED]
