"""The performance model (paper section 4.2; design 2.2): tokens per second before and after a move.

Pure; called by `policy`. The paper writes, per layer, for batch beta and contexts S^r

    T_lyr(beta, S) = W(beta)/f(beta) + sum_r S^r / g(S)         TPS = beta / (n_layers * T_lyr)

We measure W/f as a curve and 1/g as a constant, both for all layers together, so that one step
takes n_layers * T_lyr, and add what the paper leaves out: the link to the creditors.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from services.gmanager.cluster import BatchPoint, Instance, InstanceLoad, PerfConstants

#: No plan lets more waiting requests in at once; what a report says beyond is not laid out.
MAX_WAITING = 1024
#: Beyond any that a report can name.
_FAR_BATCH = 2.0**33


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """What the model needs of one instance; moves turn one point into another."""

    perf: PerfConstants
    block_size: int
    #: beta without the waiting requests.
    running: int
    #: sum_r S^r over the tokens that this instance attends to: its own here, and what it took in.
    attended_tokens: int
    free_blocks: int
    #: How many free blocks let the first 0, 1, 2 ... of the waiting requests in; rising.
    blocks_to_admit: tuple[int, ...] = (0,)
    #: What the calls to creditors add to a step.
    link_s: float = 0.0

    @property
    def waiting(self) -> int:
        return len(self.blocks_to_admit) - 1

    @property
    def admitted(self) -> int:
        """The waiting requests that the free memory lets into the batch."""
        return max(0, bisect_right(self.blocks_to_admit, self.free_blocks) - 1)

    @property
    def batch(self) -> int:
        return self.running + self.admitted  # beta

    @property
    def non_attention_s(self) -> float:
        return non_attention_s(self.perf.non_attention, self.batch)  # n_layers * W(beta)/f(beta)

    @property
    def attention_s(self) -> float:
        new_tokens = self.blocks_to_admit[self.admitted] * self.block_size
        # A stale report may know less tokens than were moved.
        tokens = max(0, self.attended_tokens + new_tokens)
        return tokens * self.perf.attention_s_per_token  # n_layers * S/g

    @property
    def step_s(self) -> float:
        return self.non_attention_s + self.attention_s + self.link_s

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s  # TPS

    def lend_out(self, num_blocks: int, link_s: float = 0.0) -> "OperatingPoint":
        """The debtor after the move: T_lyr - K^d/g plus the link, with room for K^d more tokens."""
        return replace(
            self,
            attended_tokens=self.attended_tokens - num_blocks * self.block_size,
            free_blocks=self.free_blocks + num_blocks,
            link_s=self.link_s + link_s,
        )

    def take_in(self, num_blocks: int) -> "OperatingPoint":
        """The creditor after the move: T_lyr + K^c/g, and past its spare room a smaller batch."""
        return self.lend_out(-num_blocks)

    def tokens_per_s_lending(self, num_blocks: NDArray[np.int64]) -> NDArray[np.float64]:
        """`lend_out(k).tokens_per_s` for many k at once; below zero it takes in."""
        to_admit = np.asarray(self.blocks_to_admit)
        admitted = np.searchsorted(to_admit, self.free_blocks + num_blocks, "right") - 1
        np.maximum(admitted, 0, out=admitted)
        batch = self.running + admitted
        blocks = to_admit[admitted] - num_blocks
        tokens = np.maximum(0, self.attended_tokens + blocks * self.block_size)
        batches, steps_s = zip(*_extended(self.perf.non_attention), strict=True)
        step_s = np.interp(batch, batches, steps_s) + tokens * self.perf.attention_s_per_token
        return np.asarray(batch / (step_s + self.link_s), dtype=np.float64)


def operating_point(instance: Instance, link_s: float = 0.0) -> OperatingPoint:
    """The instance as its last heartbeat describes it."""
    info, load = instance.info, instance.load
    moved_tokens = (load.lent_blocks - load.borrowed_blocks) * info.block_size
    return OperatingPoint(
        perf=info.perf,
        block_size=info.block_size,
        running=load.running,
        attended_tokens=load.running_tokens + moved_tokens,
        free_blocks=load.free_blocks,
        blocks_to_admit=_blocks_to_admit(load),
        link_s=link_s,
    )


def _blocks_to_admit(load: InstanceLoad) -> tuple[int, ...]:
    """The sizes that are known one after the other; the others count as their average."""
    if not load.waiting:
        return (0,)
    # A request that says nothing of its size still needs a block.
    sizes = [max(1, size) for size in load.waiting_sizes[: min(load.waiting, MAX_WAITING)]]
    known, others = sum(sizes), load.waiting - len(sizes)
    rest = max(others, load.waiting_blocks - known)
    numbers = range(1, min(load.waiting, MAX_WAITING) - len(sizes) + 1)
    return (*accumulate(sizes, initial=0), *(known - (-n * rest // others) for n in numbers))


def non_attention_s(curve: tuple[BatchPoint, ...], batch: float) -> float:
    """W(beta)/f(beta): linear between the measured points, and constant below the first.

    There the weights have to be read all the same. Beyond the last the slope of the last stretch
    goes on, and with one point alone time grows with the batch.
    """
    if batch <= curve[0].batch:
        return curve[0].step_s
    curve = _extended(curve)
    right = bisect_left(curve, batch, key=lambda point: point.batch)
    (batch_0, step_0_s), (batch_1, step_1_s) = curve[right - 1], curve[right]
    return step_0_s + (step_1_s - step_0_s) / (batch_1 - batch_0) * (batch - batch_0)


def _extended(curve: tuple[BatchPoint, ...]) -> tuple[BatchPoint, ...]:
    last = curve[-1]
    first = curve[-2] if len(curve) > 1 else BatchPoint(0, 0.0)
    slope_s = (last.step_s - first.step_s) / (last.batch - first.batch)
    # Noise in the last two points must not make ever larger batches ever faster.
    far_s = last.step_s + max(0.0, slope_s) * (_FAR_BATCH - last.batch)
    return (*curve, BatchPoint(_FAR_BATCH, far_s))
