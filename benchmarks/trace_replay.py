"""Replays traces against whole clusters through the router, pooled and static.

Static is the same cluster with pooling off: every instance on its own.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import httpx

from benchmarks.mixed_traces import Job, Trace
from benchmarks.running_cluster import running_cluster
from services.local.plan import ClusterSpec

#: Until an answer is whole, the queue before it included.
_ANSWER_DEADLINE_S = 240.0
#: What was given back shows in the router's view, and caches are as they will be.
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one job: when its answer was whole, None where it was refused or failed."""

    job: Job
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class Replay:
    outcomes: tuple[Outcome, ...]

    @property
    def served(self) -> frozenset[int]:
        """Which jobs, by place."""
        return frozenset(i for i, o in enumerate(self.outcomes) if o.ended_s is not None)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_s_of(self.served)

    def describe(self) -> str:
        last_s = max((outcome.ended_s or 0.0 for outcome in self.outcomes), default=0.0)
        return (
            f"{len(self.served)} of {len(self.outcomes)} requests served in {last_s:.1f} s, "
            f"{self.tokens_per_s:.1f} tokens/s"
        )

    def tokens_per_s_of(self, places: frozenset[int]) -> float:
        """Generated for these jobs, until the last of them was complete."""
        outcomes = [self.outcomes[place] for place in places & self.served]
        if not outcomes:
            return 0.0
        num_tokens = sum(outcome.job.num_output for outcome in outcomes)
        return num_tokens / max(outcome.ended_s or 0.0 for outcome in outcomes)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace, pooled and static, as often each."""

    pooled: tuple[Replay, ...]
    static: tuple[Replay, ...]

    @property
    def over_all(self) -> float:
        """Throughput over whatever each could serve."""
        return median(r.tokens_per_s for r in self.pooled) / median(
            r.tokens_per_s for r in self.static
        )

    @property
    def over_common(self) -> float:
        """Throughput over the requests that every replay served."""
        common = frozenset.intersection(*(r.served for r in (*self.pooled, *self.static)))
        return median(r.tokens_per_s_of(common) for r in self.pooled) / median(
            r.tokens_per_s_of(common) for r in self.static
        )


async def compare(
    spec: ClusterSpec, traces: Sequence[Trace], num_repeats: int, say: Callable[[str], None]
) -> dict[str, Comparison]:
    """Both clusters are up all the time and take turns: what else the machine does hits both."""
    comparisons = {}
    async with (
        running_cluster(replace(spec, pooling=True)) as pooled,
        running_cluster(replace(spec, pooling=False)) as static,
    ):
        urls = {True: pooled.http_url, False: static.http_url}
        for trace in traces:
            replays: dict[bool, list[Replay]] = {True: [], False: []}
            # A, B, B, A, ...: neither has the better turns.
            for turn in range(2 * num_repeats):
                is_pooled = turn % 4 in (1, 2)
                # Other prompts each time: nothing is found in a cache, in both alike.
                done = await replay(urls[is_pooled], spec.model_name, trace, salt=str(turn))
                replays[is_pooled].append(done)
                say(f"{trace.name}, {'pooled' if is_pooled else 'static'}: {done.describe()}")
                await asyncio.sleep(_PAUSE_S)
            comparisons[trace.name] = Comparison(tuple(replays[True]), tuple(replays[False]))
    return comparisons


async def replay(url: str, model: str, trace: Trace, salt: str) -> Replay:
    timeout = httpx.Timeout(_ANSWER_DEADLINE_S)
    limits = httpx.Limits(max_connections=len(trace.jobs))
    async with httpx.AsyncClient(
        base_url=url, timeout=timeout, limits=limits, trust_env=False
    ) as client:
        started_s = time.monotonic()

        async def run(job: Job) -> Outcome:
            await asyncio.sleep(job.at_s)
            is_served = await answer(client, model, job, salt)
            return Outcome(job, time.monotonic() - started_s if is_served else None)

        outcomes = await asyncio.gather(*(run(job) for job in trace.jobs))
    return Replay(tuple(outcomes))


async def answer(client: httpx.AsyncClient, model: str, job: Job, salt: str) -> bool:
    """Whether the request was served to its end."""
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.num_output,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    try:
        response = await client.post("/v1/completions", json=body)
    except httpx.TimeoutException:
        return False
    return response.is_success
