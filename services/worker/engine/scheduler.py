"""Which sequences run in the next step, with how many tokens. Pure: no clock, no I/O.

One token budget serves prefill and decode alike: every sequence simply catches up with the tokens
it knows. Those that decode come first, so that a long prompt never holds them up by more than the
rest of one budget. When blocks run out the order of relief is: cached prefixes (the pool does that
by itself), lend blocks of the longest sequence, recall what is lent to others, preempt the lowest
in rank, and in the end let the sequence that cannot go on give way. The highest in rank has first
claim on memory, so at least one sequence always progresses. Called by the engine once per step.
"""

from services.common.errors import Overloaded
from services.common.ids import ReqId
from services.worker.engine.admission import Admission
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.placement import Placement
from services.worker.engine.roster import Roster
from services.worker.engine.sequence import (
    FinishReason,
    Request,
    Schedule,
    Sequence,
    SequenceOutput,
)
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.kvcache.block_hash import BlockHash


class Scheduler:
    """Decides, step by step, who runs and who gives way."""

    def __init__(self, config: SchedulerConfig, blocks: SequenceBlocks) -> None:
        self.config = config
        self.blocks = blocks
        self.num_recomputed_tokens = 0
        """Of sequences that lost a part; since the start."""
        self._roster = Roster(blocks)
        self._admission = Admission(config, self._roster)
        self.placement = Placement(config, self._roster)
        """What the rManager does with the blocks between two steps."""
        self._num_arrived = 0
        self._recallable_blocks = 0

    # -- arrivals and departures ------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """The highest in rank first, as in `waiting`."""
        return self._roster.running

    @property
    def waiting(self) -> list[Sequence]:
        return self._roster.waiting

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request; Overloaded when the queue is full."""
        if len(self.waiting) >= self.config.max_waiting:
            raise Overloaded(f"{len(self.waiting)} requests are waiting already")
        self._num_arrived += 1
        sequence = Sequence.of(request, self._num_arrived, self.config.block_size, now_s)
        self._roster.add(sequence)

    def abort(self, req_id: ReqId, now_s: float) -> bool:
        """Forget the request and free everything it holds; False if it is not here (any more)."""
        sequence = self.find(req_id)
        if sequence is None:
            return False
        self._roster.remove(sequence, now_s)
        return True

    def find(self, req_id: ReqId) -> Sequence | None:
        return self._roster.find(req_id)

    # -- one step ---------------------------------------------------------------------------------

    def schedule(
        self, now_s: float, remote_free_blocks: int, recallable_blocks: int = 0
    ) -> Schedule:
        """Plan one step. `remote_free_blocks`: what creditors could still lend, as last heard;
        `recallable_blocks`: what is lent to others from here."""
        plan = Schedule(self.config.max_batched_tokens)
        plan.num_preempted = self._roster.take_num_preempted()  # for recalls
        self._recallable_blocks = recallable_blocks
        can_lend = remote_free_blocks > 0 and self.placement.may_lend(now_s)
        self.blocks.expire_remote(now_s)
        self._run_running(plan, now_s, can_lend)
        plan.num_preempted += self._roster.take_num_preempted()
        if plan.num_preempted == 0:
            self._admission.admit(plan, now_s, remote_free_blocks)
        self._admission.expire(plan, now_s)
        if can_lend or recallable_blocks > 0:
            self._relieve(plan, can_lend)
        missing = self._admission.missing_blocks(now_s, remote_free_blocks)
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
            self._roster.remove(sequence, now_s)
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
            wanted = min(len(sequence.next_chunk), plan.share(num_behind))
            if wanted == 0:
                sequence.waiting_since_s = now_s  # for its share of the budget, not for memory
                continue
            num_tokens = self.blocks.grow(sequence, wanted)
            while num_tokens == 0 and self._preempt_for(sequence, plan, can_lend, now_s):
                num_tokens = self.blocks.grow(sequence, wanted)
            if num_tokens > 0:
                plan.add(sequence, num_tokens)
                filling |= {lost_block} if lost_block else set()
            elif self._is_stalled(sequence, now_s):
                self._give_way(sequence, plan, now_s)

    # -- when memory is short ---------------------------------------------------------------------

    def _preempt_for(
        self, sequence: Sequence, plan: Schedule, can_lend: bool, now_s: float
    ) -> bool:
        """Free the lowest in rank for a higher one, if nothing milder is possible."""
        if self.placement.is_moving:
            return False
        if can_lend and self.placement.longest_movable() is not None:
            return False
        starved_s = now_s - sequence.waiting_since_s
        if self._recallable_blocks > 0 and starved_s <= self.config.recall_patience_s:
            return False
        lowest = self.running[-1]
        if lowest is sequence:
            return False
        self._roster.preempt(lowest, now_s)
        self._roster.is_admission_held = True
        plan.remove(lowest)
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
            self._roster.remove(sequence, now_s)
            return
        self._roster.preempt(sequence, now_s)
        sequence.waiting_since_s = now_s

    def _relieve(self, plan: Schedule, can_lend: bool) -> None:
        """Ask for room before the running sequences run out of it: lend blocks of the longest, or
        have back what is lent to others."""
        deficit = self.placement.num_missing_blocks
        if deficit <= 0 or self.placement.is_moving:
            return
        sequence = self.placement.longest_movable() if can_lend else None
        if sequence is None:
            plan.recall(min(deficit, self._recallable_blocks))
            return
        # What this step writes is not computed yet: only blocks that were full before it may move.
        order = self.placement.begin_move(sequence.req_id, deficit)
        if order is not None:
            plan.moves.append(order)
