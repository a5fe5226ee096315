"""The performance model (paper section 4.2; design 2.2): tokens per second before and after a move.

Pure; called by `policy`. The paper writes, per layer, for batch beta and contexts S^r

    T_lyr(beta, S) = W(beta)/f(beta) + sum_r S^r / g(S)         TPS = beta / (n_layers * T_lyr)

We measure W/f as a curve and 1/g as a constant, both for all layers together, so that one step
takes n_layers * T_lyr, and add what the paper leaves out: the link to the creditors.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from services.gmanager.cluster import BatchPoint, Instance, PerfConstants


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
    waiting: int
    #: What all of them need to start; each counts as the average, in exact integers.
    waiting_blocks: int
    #: Calls to creditors per layer, and the query rows in them.
    num_creditors: int
    num_remote_rows: int

    @property
    def admitted(self) -> int:
        """The waiting requests that the free memory lets into the batch."""
        if not self.waiting:
            return 0
        return min(self.waiting, self.free_blocks * self.waiting // self.waiting_blocks)

    def blocks_to_admit(self, num_requests: int) -> int:
        """The fewest free blocks with which so many of the waiting are admitted."""
        return -(-num_requests * self.waiting_blocks // self.waiting) if num_requests else 0

    @property
    def batch(self) -> int:
        return self.running + self.admitted  # beta

    @property
    def step_s(self) -> float:
        new_tokens = self.blocks_to_admit(self.admitted) * self.block_size
        # A stale report may know less tokens than were moved.
        tokens = max(0, self.attended_tokens + new_tokens)
        return (
            non_attention_s(self.perf.non_attention, self.batch)  # n_layers * W(beta)/f(beta)
            + tokens * self.perf.attention_s_per_token  # n_layers * S/g
            + self._link_s
        )

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s if self.batch else 0.0  # TPS

    @property
    def _link_s(self) -> float:
        if not self.num_creditors:
            return 0.0
        perf = self.perf
        bytes_s = perf.row_bytes / perf.link_bytes_per_s if perf.link_bytes_per_s else 0.0
        per_layer_s = self.num_creditors * perf.link_round_trip_s + self.num_remote_rows * bytes_s
        return perf.num_layers * per_layer_s

    def lend_out(self, num_blocks: int, new_creditors: int, new_rows: int) -> "OperatingPoint":
        """The debtor after the move: T_lyr - K^d/g plus the link, with room for K^d more tokens."""
        return replace(
            self,
            attended_tokens=self.attended_tokens - num_blocks * self.block_size,
            free_blocks=self.free_blocks + num_blocks,
            num_creditors=self.num_creditors + new_creditors,
            num_remote_rows=self.num_remote_rows + new_rows,
        )

    def take_in(self, num_blocks: int) -> "OperatingPoint":
        """The creditor after the move: T_lyr + K^c/g, and past its spare room a smaller batch."""
        return replace(
            self,
            attended_tokens=self.attended_tokens + num_blocks * self.block_size,
            free_blocks=self.free_blocks - num_blocks,
        )


def operating_point(
    instance: Instance, num_creditors: int = 0, num_remote_rows: int = 0
) -> OperatingPoint:
    """The instance as its last heartbeat describes it, with the loans that the rows show."""
    info, load = instance.info, instance.load
    moved_tokens = (load.lent_blocks - load.borrowed_blocks) * info.block_size
    return OperatingPoint(
        perf=info.perf,
        block_size=info.block_size,
        running=load.running,
        attended_tokens=load.running_tokens + moved_tokens,
        free_blocks=load.free_blocks,
        waiting=load.waiting,
        # A request that says nothing of its size still needs a block.
        waiting_blocks=max(load.waiting, load.waiting_blocks),
        num_creditors=num_creditors,
        num_remote_rows=num_remote_rows,
    )


def non_attention_s(curve: tuple[BatchPoint, ...], batch: float) -> float:
    """W(beta)/f(beta): linear between the measured points.

    Below the first point the weights have to be read all the same: constant. Beyond the last the
    slope of the last stretch goes on, and with one point alone time grows with the batch.
    """
    if batch <= curve[0].batch:
        return curve[0].step_s
    if len(curve) == 1:
        return curve[0].step_s * batch / curve[0].batch
    right = min(bisect_left(curve, batch, key=lambda point: point.batch), len(curve) - 1)
    (batch_0, step_0_s), (batch_1, step_1_s) = curve[right - 1], curve[right]
    slope_s = (step_1_s - step_0_s) / (batch_1 - batch_0)
    if batch > batch_1:
        # Noise in the last two points must not make ever larger batches ever faster.
        return step_1_s + max(0.0, slope_s) * (batch - batch_1)
    return step_0_s + slope_s * (batch - batch_0)
