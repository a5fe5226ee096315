"""Where the blocks of the running sequences lie: moves to creditors, recalls, losses. Pure.

The base of the scheduler, which adds the steps. The rManager carries out moves and recalls between
two steps and tells the outcome here.
"""

from bisect import insort
from collections.abc import Collection

from services.common.ids import InstId, MoveId, ReqId
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.sequence import MoveOrder, Schedule, Sequence
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.kvcache.block_table import RemoteSpan


def rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class Placement:
    """Owns the waiting and running sequences; their blocks are kept by `blocks`."""

    def __init__(self, config: SchedulerConfig, blocks: SequenceBlocks) -> None:
        self.config = config
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_recomputed = 0
        """Sequences that lost a part; since the start."""
        self._lend_not_before_s = 0.0
        self._num_made_room = 0
        """Sequences that gave way for a recall since the last step."""
        self._is_admission_held = False

    def find(self, req_id: ReqId) -> Sequence | None:
        for sequence in (*self.running, *self.waiting):
            if sequence.req_id == req_id:
                return sequence
        return None

    # -- moves ------------------------------------------------------------------------------------

    def begin_move(self, req_id: ReqId, num_blocks: int) -> MoveOrder | None:
        """Take the oldest movable blocks of a sequence for a move; None if there are none."""
        sequence = self.find(req_id)
        if sequence is None or not sequence.movable_blocks or num_blocks < 1:
            return None
        return self.blocks.begin_move(sequence, min(num_blocks, self.config.max_move_blocks))

    def is_current(self, order: MoveOrder) -> bool:
        """Whether the order's blocks are still those of its sequence."""
        return self._sequence_of(order) is not None

    def commit_move(self, order: MoveOrder, span: RemoteSpan) -> bool:
        """Between two steps: the creditor's copy becomes the truth and the local blocks are free.

        False if the sequence is gone or gave its blocks up meanwhile; then the copy is void.
        """
        sequence = self._sequence_of(order)
        if sequence is None:
            return False
        self.blocks.commit_move(sequence, span)
        return True

    def end_move(self, order: MoveOrder, was_refused: bool, now_s: float) -> None:
        """The move is over, committed or not."""
        sequence = self._sequence_of(order)
        if sequence is not None:
            sequence.moving_from = None
        if was_refused:
            self._lend_not_before_s = now_s + self.config.lend_retry_s
            self.blocks.drop_idle_remote()

    def _sequence_of(self, order: MoveOrder) -> Sequence | None:
        """None once the sequence is gone or has given up the blocks that the order names."""
        sequence = self.find(order.req_id)
        return sequence if sequence is not None and sequence.epoch == order.epoch else None

    # -- losses and recalls -----------------------------------------------------------------------

    def lose_parts(
        self, inst_id: InstId, now_s: float, move_ids: Collection[MoveId] | None = None
    ) -> int:
        """What `inst_id` held (all, or these moves) is to be computed again; of how many."""
        num_hurt = self.blocks.lose(self.running, inst_id, move_ids)
        self.num_recomputed += num_hurt
        return num_hurt

    def make_room(self, span: RemoteSpan, now_s: float) -> list[int] | None:
        """Local blocks for what a creditor wants back, from the lowest in rank if none are free;
        None once nobody uses the span any more."""
        while self.blocks.is_used(span):
            block_ids = self.blocks.pool.try_allocate(span.num_blocks)
            if block_ids is not None:
                return block_ids
            self._preempt(self.running[-1], Schedule(), now_s)
            self._num_made_room += 1
            self._is_admission_held = True
        return None

    def _longest_movable(self) -> Sequence | None:
        longest = max(self.running, key=lambda seq: len(seq.movable_blocks), default=None)
        return longest if longest is not None and longest.movable_blocks else None

    def _preempt(self, sequence: Sequence, plan: Schedule, now_s: float) -> None:
        self.blocks.give_up(sequence, now_s, keep_remote=False)
        self.running.remove(sequence)
        sequence.is_running = False
        insort(self.waiting, sequence, key=rank)
        plan.remove(sequence)
        plan.num_preempted += 1
