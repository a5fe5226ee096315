"""Which sequences run in the next step, with how many tokens. Pure: no clock, no I/O.

One token budget serves prefill and decode alike: every sequence simply catches up with the tokens
it knows. Those that decode come first, so that a long prompt never holds them up by more than the
rest of one budget. When blocks run out the order of relief is: cached prefixes (the pool does that
by itself), lend blocks of the longest sequence, recall what is lent to others, preempt the lowest
in rank, and claim what younger requests hold elsewhere. One order of rank for the whole cluster
says who takes from whom, so nobody waits in a circle and the highest always progresses. As a last
resort, where messages or instances were lost, a sequence that cannot go on gives its blocks up.
Called by the engine once per step.
"""

from services.common.errors import Overloaded
from services.common.ids import ReqId
from services.worker.engine.admission import Admission
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.memory_elsewhere import MemoryElsewhere
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
        self._roster.add(Sequence.of(request, self.config.block_size, now_s))

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

    def schedule(self, now_s: float, elsewhere: MemoryElsewhere) -> Schedule:
        """Plan one step."""
        plan = Schedule(self.config.max_batched_tokens)
        plan.num_preempted = self._roster.take_num_preempted()  # for recalls
        self._recallable_blocks = elsewhere.recallable_blocks
        can_lend = elsewhere.free_blocks > 0 and self.placement.may_lend(now_s)
        self.blocks.expire_remote(now_s)
        starved = self._run_running(plan, now_s, can_lend)
        plan.num_preempted += self._roster.take_num_preempted()
        if plan.num_preempted == 0:
            self._admission.admit(plan, now_s, elsewhere)
        self._admission.expire(plan, now_s)
        claimant = self._claimant(starved, now_s) if elsewhere.most_blocks > 0 else None
        if can_lend or elsewhere.recallable_blocks > 0 or claimant is not None:
            self._relieve(plan, can_lend, claimant)
        missing = self._admission.missing_blocks(now_s, elsewhere.free_blocks)
        if 0 < missing <= elsewhere.recallable_blocks:  # or it would hurt others and not help
            plan.recall(missing, self.waiting[0].rank)
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
        if sequence.failure is not None:
            self._roster.remove(sequence, now_s)
            return SequenceOutput(sequence.req_id, error=sequence.failure)
        sequence.token_ids.append(token_id)
        reason = sequence.finish_reason_after(token_id)
        if reason is not None:
            self._roster.remove(sequence, now_s)
        # A stop token ends the answer and is not part of it.
        tokens = () if reason is FinishReason.STOP else (token_id,)
        return SequenceOutput.of_step(sequence, tokens, reason)

    def _run_running(self, plan: Schedule, now_s: float, can_lend: bool) -> list[Sequence]:
        """Returns those that got no memory."""
        starved: list[Sequence] = []
        filling: set[BlockHash] = set()
        in_order = sorted(self.running, key=_catches_up)  # and by rank, as they are
        num_behind = len(in_order) + len(self.waiting)
        for sequence in in_order:
            num_behind -= 1
            if not sequence.is_running:
                continue  # preempted a moment ago
            lost_block = self.blocks.find_lost(sequence) if sequence.holes else None
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
                if lost_block is not None:
                    filling.add(lost_block)
            elif self._is_stalled(sequence, now_s):
                self._give_way(sequence, plan, now_s)
            else:
                starved.append(sequence)
        return starved

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
        self._roster.give_way(lowest, now_s)
        plan.remove(lowest)
        return True

    def _is_stalled(self, sequence: Sequence, now_s: float) -> bool:
        """The last resort: age order was of no help, since somebody does not keep to it."""
        share_done = 1.0 - sequence.num_uncomputed / sequence.num_tokens
        limit_s = self.config.stall_timeout_s * (1.0 + share_done)
        return now_s - sequence.waiting_since_s > limit_s

    def _give_way(self, sequence: Sequence, plan: Schedule, now_s: float) -> None:
        """Nobody can help: hand the blocks back to those who may do more with them."""
        sequence.num_stalls += 1
        if sequence.num_stalls > self.config.max_stalls:
            error = Overloaded("the cluster has no KV memory left for this request")
            plan.failed.append(SequenceOutput(sequence.req_id, error=error))
            self._roster.remove(sequence, now_s)
            return
        self._roster.preempt(sequence, now_s)
        sequence.waiting_since_s = now_s

    def _claimant(self, starved: list[Sequence], now_s: float) -> Sequence | None:
        """Who has waited for so long that younger requests elsewhere should give way to it.

        Only the lowest in rank has nobody here who could.
        """
        lowest = self.running[-1] if self.running else None
        if lowest is None or lowest not in starved:
            return None
        is_urgent = now_s - lowest.waiting_since_s > self.config.recall_patience_s
        return lowest if is_urgent and self.placement.may_lend(now_s) else None

    def _relieve(self, plan: Schedule, can_lend: bool, claimant: Sequence | None) -> None:
        """Ask for room before the running sequences run out of it: lend blocks of the longest, or
        have back what is lent to others."""
        num_missing, first = self.placement.missing_to_grow()
        if first is None or self.placement.is_moving:
            return
        is_lending = can_lend or claimant is not None
        sequence = self.placement.longest_movable() if is_lending else None
        if sequence is None:
            plan.recall(min(num_missing, self._recallable_blocks), first)
            return
        # What this step writes is not computed yet: only blocks that were full before it may move.
        for_whom = claimant.rank if claimant is not None else None
        order = self.placement.begin_move(sequence.req_id, num_missing, for_whom)
        if order is not None:
            plan.moves.append(order)


def _catches_up(sequence: Sequence) -> bool:
    """Whether it has more to compute than a decode does."""
    return sequence.num_uncomputed > 1
