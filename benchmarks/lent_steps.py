"""What lending costs a decode step: blocks that lie elsewhere, and blocks that are on their way.

Two instances as processes, one thread each; the owner's tokens are timed at its own gRPC door, and
moves are ordered as the gManager orders them.
"""

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.running_cluster import Pair, running_pair
from benchmarks.workload import Workload
from services.local.plan import ClusterSpec

LENT_CONTEXTS = (2048, 8192)
PACES = (16, 32)
_MOVING_BATCH = 8
_MOVING_CONTEXT = 1024
#: One order is at most so long, and its copies are what is measured.
_MOVE_BLOCKS = 32
#: Generated at most by a request: less than the model's context leaves.
_NUM_TOKENS = 160
_NUM_WARMUP_STEPS = 4
_SHARE_OF_A_MOVE = 0.75
_POLL_S = 0.05
_MOVES_DEADLINE_S = 30.0
#: As fast as it goes.
_NO_PACE = 1 << 16


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one round: median seconds of a step before, and with what is measured."""

    before_s: float
    with_s: float

    @property
    def ratio(self) -> float:
        return self.with_s / self.before_s


@dataclass(frozen=True, slots=True)
class Rounds:
    rounds: list[Steps]

    @property
    def ratio(self) -> float:
        return statistics.median(steps.ratio for steps in self.rounds)

    @property
    def before_s(self) -> float:
        return statistics.median(steps.before_s for steps in self.rounds)

    @property
    def slowdown(self) -> float:
        """The share of throughput that is lost."""
        return 1.0 - 1.0 / self.ratio


def pair_spec(spec: ClusterSpec, kv_dtype: str, tokens_per_step: int) -> ClusterSpec:
    """Two instances with memory enough, and a planner that leaves them alone."""
    most = max(max(LENT_CONTEXTS), _MOVING_BATCH * (_MOVING_CONTEXT + _NUM_TOKENS))
    return replace(
        spec,
        num_instances=2,
        num_blocks=most // spec.block_size + _MOVING_BATCH + 1,
        move_tokens_per_step=tokens_per_step,
        overrides={"worker": {"kv_dtype": kv_dtype}, "gmanager": {"planner_dry_run": True}},
    )


async def measure_lent(
    spec: ClusterSpec, kv_dtype: str, num_rounds: int, num_steps: int
) -> Mapping[int, Rounds]:
    """By context: all blocks at the owner, against half of them at an idle peer."""
    lent: dict[int, list[Steps]] = {context: [] for context in LENT_CONTEXTS}
    async with running_pair(pair_spec(spec, kv_dtype, _NO_PACE)) as pair:
        for number in range(num_rounds):
            for context in LENT_CONTEXTS:
                half = context // 2 // spec.block_size
                lent[context].append(await _lent_round(pair, context, half, (number, num_steps)))
    return {context: Rounds(rounds) for context, rounds in lent.items()}


async def _lent_round(pair: Pair, context: int, half: int, round_: tuple[int, int]) -> Steps:
    number, num_steps = round_
    prompts = Workload().prompts(1, context - _NUM_TOKENS, seed=number)
    async with pair.streams(prompts, _NUM_TOKENS) as (stream,):
        await stream.steps(_NUM_WARMUP_STEPS)
        local = await stream.steps(num_steps)
        await _lend(pair, stream.req_id, half)
        await stream.steps(_NUM_WARMUP_STEPS)
        lent = await stream.steps(num_steps)
    await _until_borrowed(pair, 0)
    return Steps(statistics.median(local), statistics.median(lent))


async def measure_moving(
    spec: ClusterSpec, kv_dtype: str, num_rounds: int, num_steps: int
) -> Mapping[int, Rounds]:
    """By tokens moved in a step: a batch that decodes, against the same while blocks leave it."""
    moving: dict[int, Rounds] = {}
    prompts = Workload().prompts(_MOVING_BATCH, _MOVING_CONTEXT - _NUM_TOKENS, seed=0)
    for pace in PACES:
        num_moving = int(_SHARE_OF_A_MOVE * _MOVE_BLOCKS * spec.block_size / pace)
        async with running_pair(pair_spec(spec, kv_dtype, pace)) as pair:
            rounds = [
                await _moving_round(pair, prompts, num_steps, min(num_steps, num_moving))
                for _ in range(num_rounds)
            ]
        moving[pace] = Rounds(rounds)
    return moving


async def _moving_round(
    pair: Pair, prompts: list[list[int]], num_steps: int, num_moving: int
) -> Steps:
    """Ends before the move does, so the next round finds all of its prompts in the cache."""
    async with pair.streams(prompts, _NUM_TOKENS) as streams:
        longest = streams[0]
        await longest.steps(_NUM_WARMUP_STEPS)
        before = await longest.steps(num_steps)
        await _order(pair, longest.req_id, _MOVE_BLOCKS)
        moving = await longest.steps(num_moving)
    return Steps(statistics.median(before), statistics.median(moving))


async def _lend(pair: Pair, req_id: int, num_blocks: int) -> None:
    """Move by move, each as long as one may be."""
    for begin in range(0, num_blocks, _MOVE_BLOCKS):
        await _order(pair, req_id, min(num_blocks - begin, _MOVE_BLOCKS))
    await _until_borrowed(pair, num_blocks)


async def _order(pair: Pair, req_id: int, num_blocks: int) -> None:
    """A move, as soon as none is under way."""
    async with asyncio.timeout(_MOVES_DEADLINE_S):
        while not await pair.move(req_id, num_blocks):
            await asyncio.sleep(_POLL_S)


async def _until_borrowed(pair: Pair, num_blocks: int) -> None:
    async with asyncio.timeout(_MOVES_DEADLINE_S):
        while await pair.borrowed_blocks() != num_blocks:
            await asyncio.sleep(_POLL_S)
