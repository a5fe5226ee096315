"""Which of the waiting sequences start now, and which have waited too long. Pure."""

from services.common.errors import Overloaded
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.roster import Roster
from services.worker.engine.sequence import Schedule, Sequence, SequenceOutput


class Admission:
    """The scheduler's second half of a step, after the running sequences have got theirs."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._blocks = roster.blocks

    def admit(self, plan: Schedule, now_s: float, elsewhere: MemoryElsewhere) -> None:
        """In order of rank, whoever's whole known sequence fits in what can be had.

        One that does not fit lets others pass until its patience ends: memory that is too little
        for it need not lie idle, and it need not wait for ever. Then the oldest on this instance
        begins with what there is, and younger ones give way to it as to any that runs.
        """
        roster = self._roster
        roster.is_admission_held = roster.is_admission_held and bool(roster.running)
        for sequence in list(roster.waiting):
            is_patient = now_s - sequence.waiting_since_s <= self._config.patience_s
            if not self._has_slot(plan) or (is_patient and not self._has_room()):
                return
            if self._fits(sequence, elsewhere.free_blocks):
                self._start(sequence, plan, now_s)
            elif not is_patient:
                if self._has_first_claim(sequence, elsewhere):
                    self._start(sequence, plan, now_s)
                return

    def missing_blocks(self, now_s: float, remote_free_blocks: int) -> int:
        """What the first in the queue has lacked for longer than its patience."""
        roster = self._roster
        if not roster.waiting or len(roster.running) >= self._config.max_running:
            return 0
        first = roster.waiting[0]
        if now_s - first.waiting_since_s <= self._config.patience_s:
            return 0
        return self._blocks.blocks_to_start(first) - self._available(remote_free_blocks)

    def expire(self, plan: Schedule, now_s: float) -> None:
        for sequence in list(self._roster.waiting):
            if now_s - sequence.waiting_since_s > self._config.queue_timeout_s:
                error = Overloaded("no KV memory became free in time")
                plan.failed.append(SequenceOutput(sequence.req_id, error=error))
                self._roster.remove(sequence, now_s)

    def _has_slot(self, plan: Schedule) -> bool:
        is_full = len(self._roster.running) >= self._config.max_running
        return not is_full and plan.num_tokens < plan.max_tokens

    def _has_room(self) -> bool:
        return not self._roster.is_admission_held and self._blocks.pool.num_free > 0

    def _fits(self, sequence: Sequence, remote_free_blocks: int) -> bool:
        available = self._available(remote_free_blocks)
        return self._has_room() and self._blocks.blocks_to_start(sequence) <= available

    def _has_first_claim(self, sequence: Sequence, elsewhere: MemoryElsewhere) -> bool:
        """Whether all who have memory here are younger, and it could fit if everybody gave way."""
        others = [running.rank for running in self._roster.running[:1]]
        if elsewhere.oldest_guest is not None:
            others.append(elsewhere.oldest_guest)
        most = self._blocks.pool.num_blocks + elsewhere.most_blocks
        is_oldest = all(sequence.rank < other for other in others)
        return is_oldest and self._blocks.blocks_to_start(sequence) <= most

    def _start(self, sequence: Sequence, plan: Schedule, now_s: float) -> None:
        num_behind = len(self._roster.waiting) - 1
        self._roster.start(sequence)
        sequence.waiting_since_s = now_s
        wanted = min(sequence.num_uncomputed, plan.share(num_behind))
        num_tokens = self._blocks.grow(sequence, wanted)
        if num_tokens > 0:
            plan.add(sequence, num_tokens)

    def _available(self, remote_free_blocks: int) -> int:
        """Blocks that a newcomer may count on."""
        # One spare block for each running sequence, or the newcomer is preempted at once.
        spare = self._promised_blocks() + len(self._roster.running)
        return self._blocks.pool.num_free + remote_free_blocks - spare

    def _promised_blocks(self) -> int:
        """Blocks that sequences already admitted still need for the tokens they know."""
        return sum(seq.table.blocks_to_reach(seq.num_tokens + 1) for seq in self._roster.running)
