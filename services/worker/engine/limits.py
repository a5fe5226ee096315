"""What the scheduler may give to whom, and for how long. Made by `core` from the settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    block_size: int
    max_batched_tokens: int
    max_running: int
    max_waiting: int = 256
    max_move_blocks: int = 32
    """Blocks in one move: enough to outrun a prefill chunk, small enough to commit often."""
    lend_retry_s: float = 0.5
    """After a refused move, nothing is offered to creditors for this long."""
    recall_patience_s: float = 1.0
    """A running sequence waits this long for blocks that others could give back or lend, before a
    younger one is preempted for it, here or elsewhere."""
    stall_timeout_s: float = 15.0
    """The last resort: a running sequence that cannot go on for this long gives its blocks up; one
    that has most of its tokens computed waits up to twice as long, so that of two the one with less
    to lose yields."""
    max_stalls: int = 5
    queue_timeout_s: float = 60.0
    patience_s: float = 10.0
    """A waiting request lets others that fit pass for this long; then nobody does until it runs,
    and if it is the oldest here, younger ones give way to it."""
