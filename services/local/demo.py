"""`demo`: prove that pooled KV memory changes no token and leaks no block.

The same long prompt, greedily, on a cluster whose instances are each too small for it, and on one
instance that holds it all.
"""

import json
from dataclasses import asdict, dataclass, replace

from rich.console import Console

from services.common.errors import ConfigError
from services.local.client import ChatRequest
from services.local.cluster import LocalCluster
from services.local.console import line_writer
from services.local.map_reader import is_idle, num_leaked_blocks
from services.local.options import Options
from services.local.plan import ClusterSpec
from services.local.progress import Progress
from services.local.prompt import build_request
from services.local.screen import show_request
from services.local.showcase import Outcome

#: Heartbeats carry the last release to the gManager well within this.
_RELEASE_DEADLINE_S = 15.0


@dataclass(frozen=True, slots=True)
class Report:
    """The last line of the output."""

    prompt_tokens: int
    kv_capacity_tokens_per_instance: int
    borrowed_blocks_peak: int
    tokens_equal_to_single_instance: bool
    tokens_per_second: float
    leaked_blocks: int

    @property
    def is_good(self) -> bool:
        return (
            self.tokens_equal_to_single_instance
            and self.leaked_blocks == 0
            and self.borrowed_blocks_peak > 0
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))


async def demo(options: Options, console: Console) -> Report:
    """Runs the two clusters one after the other; both have ended when it returns."""
    if options.instances < 2:
        raise ConfigError("a demonstration of pooling needs at least 2 instances")
    progress = Progress(line_writer(console))
    async with progress.step("preparing model and kernels"):
        spec = await options.prepare(progress.say)
    request = build_request(spec, options.max_new_tokens)
    pooled, num_leaked = await _run_once(options.new_cluster(spec), request, console, progress)
    progress.say("now the same prompt on one instance that holds all of it")
    big = options.new_cluster(as_single_instance(spec))
    single, num_leaked_single = await _run_once(big, request, console, progress)
    return Report(
        prompt_tokens=pooled.prompt_tokens,
        kv_capacity_tokens_per_instance=spec.instance_capacity_tokens,
        borrowed_blocks_peak=pooled.borrowed_blocks_peak,
        tokens_equal_to_single_instance=is_same_answer(pooled, single),
        tokens_per_second=round(pooled.tokens_per_second, 2),
        leaked_blocks=num_leaked + num_leaked_single,
    )


def as_single_instance(spec: ClusterSpec) -> ClusterSpec:
    """One instance with the memory of all."""
    return replace(spec, num_instances=1, num_blocks=spec.num_blocks * spec.num_instances)


def is_same_answer(pooled: Outcome, single: Outcome) -> bool:
    # The front door speaks text. Equal text of an equal number of tokens is equal tokens.
    return (pooled.text, pooled.completion_tokens) == (single.text, single.completion_tokens)


async def _run_once(
    cluster: LocalCluster, request: ChatRequest, console: Console, progress: Progress
) -> tuple[Outcome, int]:
    """The outcome, and how many blocks were not free again afterwards."""
    await cluster.start(progress)
    try:
        outcome = await show_request(cluster, request, console, progress)
        view = await cluster.wait_view(is_idle, _RELEASE_DEADLINE_S)
        return outcome, num_leaked_blocks(view)
    finally:
        await cluster.stop(progress.say)
