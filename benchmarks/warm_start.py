"""`python -m benchmarks.warm_start`: from nothing running to the first token of a local cluster.

Everything is installed and converted before; that is what "warm" means. The breakdown is by stage
of the supervisor, with the first request's time to its first token at the end.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.command import new_parser, run
from benchmarks.report import Report
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.local.client import ChatRequest, stream_chat
from services.local.cluster import LocalCluster
from services.local.plan import ClusterSpec
from services.local.preflight import find_redis_server
from services.local.progress import Progress


class StageTimes(Progress):
    """Keeps how long each step took instead of telling it."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        self.seconds: dict[str, float] = {}

    @asynccontextmanager
    async def step(self, text: str) -> AsyncIterator[None]:
        started_s = time.monotonic()
        yield
        self.seconds[text] = time.monotonic() - started_s


async def measure(spec: ClusterSpec) -> dict[str, float]:
    """Seconds by stage, in order; the last is the first token."""
    stages = StageTimes()
    with tempfile.TemporaryDirectory(prefix="infinite-llm-") as folder:
        cluster = LocalCluster(spec, Path(folder), find_redis_server(os.environ), os.environ)
        await cluster.start(stages)
        try:
            request = ChatRequest(spec.model_name, "What is the capital of France?", 4)
            async with stages.step("first token"):
                async for delta in stream_chat(cluster.http_url, request):
                    if delta.text:
                        break
        finally:
            await cluster.stop()
    return stages.seconds


def main(args: list[str]) -> None:
    new_parser("warm_start", __doc__).parse_args(args)
    report = Report()
    num_cores = len(os.sched_getaffinity(0))
    report.machine(num_cores)
    spec = ClusterSpec(
        model=resolve(DEFAULT_MODEL, default_cache_dir(os.environ), report.say),
        model_name=DEFAULT_MODEL,
        num_cores=num_cores,
    )
    seconds = asyncio.run(measure(spec))
    rows = [(stage, f"{duration_s:.2f}") for stage, duration_s in seconds.items()]
    report.table("Warm start, two instances", ("stage", "seconds"), rows)
    total_s = sum(seconds.values())
    breakdown = {stage: round(duration_s, 2) for stage, duration_s in seconds.items()}
    report.last_line({"first_token_s": round(total_s, 2), "breakdown_s": breakdown})


if __name__ == "__main__":
    sys.exit(run(main))
