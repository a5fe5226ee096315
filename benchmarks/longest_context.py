"""The longest request that a cluster serves to its end, found from above."""

import random
from dataclasses import dataclass, replace

from benchmarks.doors import the_router
from benchmarks.mixed_traces import VOCABULARY, Job
from benchmarks.running_cluster import running_cluster
from services.common.errors import InternalError
from services.local.plan import ClusterSpec

_NUM_OUTPUT = 16


@dataclass(frozen=True, slots=True)
class Longest:
    num_tokens: int
    one_instance_tokens: int

    @property
    def ratio(self) -> float:
        return self.num_tokens / self.one_instance_tokens


async def measure_longest(spec: ClusterSpec, instances: tuple[int, ...]) -> dict[int, Longest]:
    """By number of instances, each against one instance of the same size."""
    one = await _longest(replace(spec, num_instances=1, pooling=False))
    return {
        num: Longest(await _longest(replace(spec, num_instances=num, pooling=True)), one)
        for num in instances
    }


async def _longest(spec: ClusterSpec) -> int:
    """Tokens of prompt and answer: what is too long is refused at once, so begin with too much."""
    source = random.Random(0)
    num_tokens = spec.num_instances * spec.instance_capacity_tokens
    async with (
        running_cluster(spec) as cluster,
        the_router(cluster, salt="") as ask,
    ):
        while num_tokens > _NUM_OUTPUT:
            prompt = [source.randrange(VOCABULARY) for _ in range(num_tokens - _NUM_OUTPUT)]
            if await ask(Job(tuple(prompt), _NUM_OUTPUT)):
                return num_tokens
            num_tokens -= spec.block_size
    raise InternalError("no request was served")
