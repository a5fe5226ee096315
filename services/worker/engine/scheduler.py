"""Which sequences run in the next step, with how many tokens. Pure: no clock, no I/O.

One token budget serves prefill and decode alike: every sequence simply catches up with the tokens
it knows. Those that decode come first, so that a long prompt never holds them up by more than the
rest of one budget. When blocks run out the order of relief is: cached prefixes (the pool does that
by itself), lend blocks of the longest sequence, recall what is lent to others, preempt the lowest
in rank, and in the end let the sequence that cannot go on give way. The highest in rank has first
claim on memory, so at least one sequence always progresses. Called by the engine once per step.
"""

from bisect import insort

from services.common.errors import Overloaded
from services.common.ids import ReqId
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.placement import Placement, rank
from services.worker.engine.sequence import (
    FinishReason,
    Request,
    Schedule,
    Sequence,
    SequenceOutput,
)
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.kvcache.block_hash import BlockHash

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler(Placement):
    """Decides, step by step, who runs and who gives way."""

    def __init__(self, config: SchedulerConfig, blocks: SequenceBlocks) -> None:
        super().__init__(config, blocks)
        self.num_recomputed_tokens = 0
        """Of sequences that lost a part; since the start."""
        self._num_arrived = 0
        self._recallable_blocks = 0

    # -- arrivals and departures ------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request; Overloaded when the queue is full."""
        if len(self.waiting) >= self.config.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests are waiting already")
        self._num_arrived += 1
        sequence = Sequence.of(request, self._num_arrived, self.config.block_size, now_s)
        insort(self.waiting, sequence, key=rank)

    def abort(self, req_id: ReqId, now_s: float) -> bool:
        """Forget the request and free everything it holds; False if it is not here (any more)."""
        sequence = self.find(req_id)
        if sequence is None:
            return False
        self._drop(sequence, now_s)
        return True

    # -- one step ---------------------------------------------------------------------------------

    def schedule(
        self, now_s: float, remote_free_blocks: int, recallable_blocks: int = 0
    ) -> Schedule:
        """Plan one step. `remote_free_blocks`: what creditors could still lend, as last heard;
        `recallable_blocks`: what is lent to others from here."""
        plan = Schedule(num_preempted=self._num_made_room)
        self._num_made_room = 0
        self._recallable_blocks = recallable_blocks
        can_lend = remote_free_blocks > 0 and now_s >= self._lend_not_before_s
        self.blocks.expire_remote(now_s)
        self._run_running(plan, now_s, can_lend)
        if plan.num_preempted == 0:
            self._admit(plan, now_s, remote_free_blocks)
        self._expire_waiting(plan, now_s)
        if can_lend or recallable_blocks > 0:
            self._relieve(plan, can_lend)
        missing = self._missing_to_admit(now_s, remote_free_blocks)
        if missing <= recallable_blocks:  # or it would hurt others and not help
            plan.recall(missing)
        return plan

    def postprocess(
        self, plan: Schedule, sampled: dict[ReqId, int], now_s: float
    ) -> list[SequenceOutput]:
        """Record what the step computed; returns the new tokens and ends."""
        outputs = []
        for item in plan.items:
            sequence = item.sequence
            self.num_recomputed_tokens += item.num_tokens if sequence.holes else 0
            sequence.advance(item.num_tokens)
            sequence.waiting_since_s = now_s
            self.blocks.name_full_blocks(sequence, item.start, item.end)
            token_id = sampled.get(sequence.req_id)
            if token_id is not None:
                outputs.append(self._append(sequence, token_id, now_s))
        return outputs

    def _append(self, sequence: Sequence, token_id: int, now_s: float) -> SequenceOutput:
        sequence.token_ids.append(token_id)
        reason = sequence.finish_reason_after(token_id)
        if reason is not None:
            self._drop(sequence, now_s)
        # A stop token ends the answer and is not part of it.
        tokens = () if reason is FinishReason.STOP else (token_id,)
        return SequenceOutput.of_step(sequence, tokens, reason)

    def _run_running(self, plan: Schedule, now_s: float, can_lend: bool) -> None:
        filling: set[BlockHash] = set()
        in_order = sorted(self.running, key=lambda seq: (seq.num_uncomputed > 1, seq.rank))
        for index, sequence in enumerate(in_order):
            if not sequence.is_running:
                continue  # preempted a moment ago
            num_behind = len(in_order) - index - 1 + len(self.waiting)
            self.blocks.find_again(sequence)
            lost_block = self.blocks.next_lost_block(sequence)
            if lost_block in filling:
                sequence.waiting_since_s = now_s  # another computes what both have lost
                continue
            wanted = min(len(sequence.next_chunk), self._share(plan, num_behind))
            if wanted == 0:
                continue
            num_tokens = self.blocks.grow(sequence, wanted)
            while num_tokens == 0 and self._preempt_for(sequence, plan, can_lend, now_s):
                num_tokens = self.blocks.grow(sequence, wanted)
            if num_tokens > 0:
                plan.add(sequence, num_tokens)
                filling |= {lost_block} if lost_block else set()
            elif self._is_stalled(sequence, now_s):
                self._give_way(sequence, plan, now_s)

    def _share(self, plan: Schedule, num_behind: int) -> int:
        """Tokens that a sequence may take: half the rest while others behind it want some, too.

        So a short prompt behind a long one starts at once, and the long one still goes on.
        """
        left = self.config.max_batched_tokens - plan.num_tokens
        return -(-left // 2) if num_behind else left

    def _preempt_for(
        self, sequence: Sequence, plan: Schedule, can_lend: bool, now_s: float
    ) -> bool:
        """Free the lowest in rank for a higher one, if nothing milder is possible."""
        if any(other.is_moving for other in self.running):
            return False
        if can_lend and self._longest_movable() is not None:
            return False
        starved_s = now_s - sequence.waiting_since_s
        if self._recallable_blocks > 0 and starved_s <= self.config.recall_patience_s:
            return False
        lowest = self.running[-1]
        if lowest is sequence:
            return False
        self._preempt(lowest, plan, now_s)
        # Whoever was preempted comes back when somebody has finished: not into the same shortage.
        self._is_admission_held = True
        return True

    def _is_stalled(self, sequence: Sequence, now_s: float) -> bool:
        """Two instances that fill each other's memory would otherwise wait for each other."""
        share_done = 1.0 - sequence.num_uncomputed / sequence.num_tokens
        limit_s = self.config.stall_timeout_s * (1.0 + share_done)
        return now_s - sequence.waiting_since_s > limit_s

    def _give_way(self, sequence: Sequence, plan: Schedule, now_s: float) -> None:
        """Nothing here can help: hand the blocks back, so that no two wait in a circle."""
        sequence.num_stalls += 1
        if sequence.num_stalls > self.config.max_stalls:
            error = Overloaded("the cluster has no KV memory left for this request")
            plan.failed.append(SequenceOutput(sequence.req_id, error=error))
            self._drop(sequence, now_s)
            return
        self._preempt(sequence, plan, now_s)
        sequence.waiting_since_s = now_s

    # -- admission --------------------------------------------------------------------------------

    def _admit(self, plan: Schedule, now_s: float, remote_free_blocks: int) -> None:
        """In order of rank, whoever's whole known sequence fits in what can be had.

        One that does not fit lets others pass until its patience ends: memory that is too little
        for it need not lie idle, and it need not wait for ever.
        """
        self._is_admission_held = self._is_admission_held and bool(self.running)
        for sequence in list(self.waiting):
            if not self._has_room_for_one_more(plan):
                return
            if self.blocks.blocks_to_start(sequence) <= self._available(remote_free_blocks):
                self._start(sequence, plan, now_s)
            elif now_s - sequence.waiting_since_s > self.config.patience_s:
                return

    def _has_room_for_one_more(self, plan: Schedule) -> bool:
        return (
            not self._is_admission_held
            and self.blocks.pool.num_free > 0
            and len(self.running) < self.config.max_running
            and plan.num_tokens < self.config.max_batched_tokens
        )

    def _start(self, sequence: Sequence, plan: Schedule, now_s: float) -> None:
        self.blocks.start(sequence)
        wanted = min(sequence.num_uncomputed, self._share(plan, len(self.waiting) - 1))
        num_tokens = self.blocks.grow(sequence, wanted)
        self.waiting.remove(sequence)
        sequence.waiting_since_s = now_s
        insort(self.running, sequence, key=rank)
        sequence.is_running = True
        if num_tokens > 0:
            plan.add(sequence, num_tokens)

    def _available(self, remote_free_blocks: int) -> int:
        """Blocks that a newcomer may count on."""
        # One spare block for each running sequence, or the newcomer is preempted at once.
        spare = self._promised_blocks() + len(self.running)
        return self.blocks.pool.num_free + remote_free_blocks - spare

    def _missing_to_admit(self, now_s: float, remote_free_blocks: int) -> int:
        """Blocks that the first in the queue has lacked for longer than its patience."""
        if not self.waiting or len(self.running) >= self.config.max_running:
            return 0
        first = self.waiting[0]
        if now_s - first.waiting_since_s <= self.config.patience_s:
            return 0
        return self.blocks.blocks_to_start(first) - self._available(remote_free_blocks)

    def _promised_blocks(self) -> int:
        """Blocks that sequences already admitted still need for the tokens they know."""
        return sum(seq.table.blocks_to_reach(seq.num_tokens + 1) for seq in self.running)

    def _expire_waiting(self, plan: Schedule, now_s: float) -> None:
        for sequence in list(self.waiting):
            if now_s - sequence.waiting_since_s > self.config.queue_timeout_s:
                error = Overloaded("no KV memory became free in time")
                plan.failed.append(SequenceOutput(sequence.req_id, error=error))
                self._drop(sequence, now_s)

    # -- lending ----------------------------------------------------------------------------------

    def _relieve(self, plan: Schedule, can_lend: bool) -> None:
        """Ask for room before the running sequences run out of it: lend blocks of the longest, or
        have back what is lent to others."""
        growth = sum(
            seq.table.blocks_to_reach(seq.num_tokens + self.config.block_size)
            for seq in self.running
        )
        deficit = growth - self.blocks.pool.num_free
        if deficit <= 0 or any(seq.is_moving for seq in self.running):
            return
        sequence = self._longest_movable() if can_lend else None
        if sequence is None:
            plan.recall(min(deficit, self._recallable_blocks))
            return
        # What this step writes is not computed yet: only blocks that were full before it may move.
        order = self.begin_move(sequence.req_id, deficit)
        if order is not None:
            plan.moves.append(order)

    def _drop(self, sequence: Sequence, now_s: float) -> None:
        self.blocks.give_up(sequence, now_s, keep_remote=True)
        if sequence.is_running:
            self.running.remove(sequence)
            sequence.is_running = False
            self._is_admission_held = False
        else:
            self.waiting.remove(sequence)
