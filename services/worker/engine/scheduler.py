"""Which sequences run in the next step, with how many tokens. Pure: no clock, no I/O.

One token budget serves prefill and decode alike: every sequence simply catches up with the tokens
it knows. When blocks run out the order of relief is: lend blocks of the longest sequence, preempt
the youngest, and in the end let the sequence that cannot go on give way. The oldest has first
claim, so at least one sequence always progresses. Called by the engine once per step.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from services.common.errors import Overloaded
from services.common.ids import InstId, ReqId
from services.worker.engine.sequence import (
    FinishReason,
    MoveOrder,
    Request,
    Schedule,
    ScheduledSequence,
    Sequence,
    SequenceOutput,
)
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.block_table import RemoteSpan


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
    stall_timeout_s: float = 10.0
    """A running sequence that cannot go on for this long gives its blocks up."""
    max_stalls: int = 2
    queue_timeout_s: float = 60.0


def _age(sequence: Sequence) -> int:
    return sequence.arrival


class Scheduler:
    """Owns the waiting and running sequences and their blocks in `pool`."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._pool = pool
        self._num_arrived = 0
        self._lend_not_before_s = 0.0
        self._released: list[tuple[ReqId, RemoteSpan]] = []

    # -- arrivals and departures ------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request; Overloaded when the queue is full."""
        if len(self.waiting) >= self.config.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests are waiting already")
        self._num_arrived += 1
        sequence = Sequence.of(request, self._num_arrived, self.config.block_size, now_s)
        insort(self.waiting, sequence, key=_age)

    def abort(self, req_id: ReqId) -> bool:
        """Forget the request and free everything it holds; False if it is not here (any more)."""
        sequence = self.find(req_id)
        if sequence is None:
            return False
        self._drop(sequence)
        return True

    def find(self, req_id: ReqId) -> Sequence | None:
        for sequence in (*self.running, *self.waiting):
            if sequence.req_id == req_id:
                return sequence
        return None

    def take_released(self) -> list[tuple[ReqId, RemoteSpan]]:
        """Spans that no sequence uses any more; the caller tells their creditors."""
        released, self._released = self._released, []
        return released

    # -- one step ---------------------------------------------------------------------------------

    def schedule(self, now_s: float, remote_free_blocks: int) -> Schedule:
        """Plan one step. `remote_free_blocks`: what creditors could still lend, as last heard."""
        plan = Schedule()
        can_lend = remote_free_blocks > 0 and now_s >= self._lend_not_before_s
        self._run_running(plan, now_s, can_lend)
        if plan.num_preempted == 0:
            self._admit(plan, now_s, remote_free_blocks)
        self._expire_waiting(plan, now_s)
        if can_lend:
            self._lend_ahead(plan)
        return plan

    def postprocess(
        self, plan: Schedule, sampled: dict[ReqId, int], now_s: float
    ) -> list[SequenceOutput]:
        """Record what the step computed; returns the new tokens and ends."""
        outputs = []
        for item in plan.items:
            sequence = item.sequence
            sequence.num_computed += item.num_tokens
            sequence.waiting_since_s = now_s
            token_id = sampled.get(sequence.req_id)
            if token_id is None:
                continue
            sequence.token_ids.append(token_id)
            reason = sequence.finish_reason_after(token_id)
            if reason is not None:
                self._drop(sequence)
            # A stop token ends the answer and is not part of it.
            tokens = () if reason is FinishReason.STOP else (token_id,)
            outputs.append(SequenceOutput(sequence.req_id, tokens, reason))
        return outputs

    def _run_running(self, plan: Schedule, now_s: float, can_lend: bool) -> None:
        budget = self.config.max_batched_tokens
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence not in self.running:
                continue  # preempted for an older one a moment ago
            num_tokens = self._grow(sequence, min(sequence.num_uncomputed, budget))
            while num_tokens == 0 and self._preempt_for(sequence, plan, can_lend):
                num_tokens = self._grow(sequence, min(sequence.num_uncomputed, budget))
            if num_tokens > 0:
                plan.items.append(ScheduledSequence(sequence, num_tokens))
                budget -= num_tokens
            elif now_s - sequence.waiting_since_s > self.config.stall_timeout_s:
                self._give_way(sequence, plan, now_s)

    def _grow(self, sequence: Sequence, wanted: int) -> int:
        """Allocate for `wanted` more tokens, or what there is; returns the tokens that fit."""
        table = sequence.table
        needed = table.blocks_to_reach(sequence.num_computed + wanted)
        blocks = None
        while needed > 0 and blocks is None:
            needed = min(needed, self._pool.num_free)
            blocks = self._pool.try_allocate(needed)
        table.append(blocks or ())
        return min(wanted, table.num_blocks * self.config.block_size - sequence.num_computed)

    def _preempt_for(self, sequence: Sequence, plan: Schedule, can_lend: bool) -> bool:
        """Free the youngest's blocks for an older one, if nothing milder is possible."""
        if any(other.is_moving for other in self.running):
            return False
        if can_lend and self._longest_movable() is not None:
            return False
        youngest = self.running[-1]
        if youngest is sequence:
            return False
        self._preempt(youngest)
        plan.num_preempted += 1
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up_blocks(sequence)
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_age)

    def _give_way(self, sequence: Sequence, plan: Schedule, now_s: float) -> None:
        """Nothing here can help: hand the blocks back, so that no two wait in a circle."""
        sequence.num_stalls += 1
        if sequence.num_stalls > self.config.max_stalls:
            error = Overloaded("the cluster has no KV memory left for this request")
            plan.failed.append(SequenceOutput(sequence.req_id, error=error))
            self._drop(sequence)
            return
        self._preempt(sequence)
        plan.num_preempted += 1
        sequence.waiting_since_s = now_s

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, plan: Schedule, now_s: float, remote_free_blocks: int) -> None:
        """In age order, while the whole known sequence fits in what can be had."""
        budget = self.config.max_batched_tokens - plan.num_tokens
        available = self._pool.num_free + remote_free_blocks - self._promised_blocks()
        while self.waiting and budget > 0 and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            needed = sequence.table.blocks_to_reach(sequence.num_tokens + 1)
            # One spare block for each running sequence, or the newcomer is preempted at once.
            if needed > available - (len(self.running) if self.running else 0):
                return
            num_tokens = self._grow(sequence, min(sequence.num_uncomputed, budget))
            if num_tokens == 0:
                return
            self.waiting.pop(0)
            insort(self.running, sequence, key=_age)
            sequence.waiting_since_s = now_s
            plan.items.append(ScheduledSequence(sequence, num_tokens))
            budget -= num_tokens
            available -= needed

    def _promised_blocks(self) -> int:
        """Blocks that sequences already admitted still need for the tokens they know."""
        return sum(seq.table.blocks_to_reach(seq.num_tokens + 1) for seq in self.running)

    def _expire_waiting(self, plan: Schedule, now_s: float) -> None:
        for sequence in list(self.waiting):
            if now_s - sequence.waiting_since_s > self.config.queue_timeout_s:
                error = Overloaded("no KV memory became free in time")
                plan.failed.append(SequenceOutput(sequence.req_id, error=error))
                self._drop(sequence)

    # -- lending ----------------------------------------------------------------------------------

    def begin_move(self, req_id: ReqId, num_blocks: int) -> MoveOrder | None:
        """Take the oldest movable blocks of a sequence for a move; None if there are none."""
        sequence = self.find(req_id)
        if sequence is None or sequence.num_movable_blocks == 0 or num_blocks < 1:
            return None
        count = min(num_blocks, sequence.num_movable_blocks, self.config.max_move_blocks)
        sequence.is_moving = True
        return MoveOrder(req_id, sequence.epoch, tuple(sequence.table.local[:count]))

    def commit_move(self, order: MoveOrder, span: RemoteSpan) -> bool:
        """Between two steps: the creditor's copy becomes the truth and the local blocks are free.

        False if the sequence is gone or gave its blocks up meanwhile; then the copy is void.
        """
        sequence = self.find(order.req_id)
        if sequence is None or sequence.epoch != order.epoch:
            return False
        self._pool.free(sequence.table.commit_move(span))
        return True

    def end_move(self, order: MoveOrder, was_refused: bool, now_s: float) -> None:
        """The move is over, committed or not."""
        sequence = self.find(order.req_id)
        if sequence is not None and sequence.epoch == order.epoch:
            sequence.is_moving = False
        if was_refused:
            self._lend_not_before_s = now_s + self.config.lend_retry_s

    def lose_parts(self, inst_id: InstId, req_ids: Iterable[ReqId] | None = None) -> int:
        """Recompute the sequences (all, or those named) with blocks on `inst_id`; how many."""
        wanted = None if req_ids is None else set(req_ids)
        lost = [
            sequence
            for sequence in self.running
            if any(span.inst_id == inst_id for span in sequence.table.remote)
            and (wanted is None or sequence.req_id in wanted)
        ]
        for sequence in lost:
            self._preempt(sequence)
        return len(lost)

    def _lend_ahead(self, plan: Schedule) -> None:
        """Ask for room before the running sequences run out of it, from the longest sequence."""
        growth = sum(
            seq.table.blocks_to_reach(seq.num_tokens + self.config.block_size)
            for seq in self.running
        )
        deficit = growth - self._pool.num_free
        sequence = self._longest_movable()
        if deficit <= 0 or sequence is None or any(seq.is_moving for seq in self.running):
            return
        # What this step writes is not computed yet: only blocks that were full before it may move.
        order = self.begin_move(sequence.req_id, deficit)
        if order is not None:
            plan.moves.append(order)

    def _longest_movable(self) -> Sequence | None:
        movable = [seq for seq in self.running if seq.num_movable_blocks > 0]
        return max(movable, key=lambda seq: seq.num_movable_blocks, default=None)

    # -- blocks -----------------------------------------------------------------------------------

    def _drop(self, sequence: Sequence) -> None:
        self._give_up_blocks(sequence)
        queue = self.running if sequence in self.running else self.waiting
        queue.remove(sequence)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        local, remote = sequence.table.clear()
        self._pool.free(local)
        self._released.extend((sequence.req_id, span) for span in remote)
        sequence.num_computed = 0
        sequence.epoch += 1
        sequence.is_moving = False
