"""Who waits and who runs, both in order of rank. Pure.

Owner of the two lists; the blocks of those who run are kept by `blocks`. Whoever leaves the running
ones gives its blocks up here, so that nobody who waits ever holds any.
"""

from bisect import insort

from services.common.ids import ReqId
from services.worker.engine.sequence import Sequence
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.rank import Rank


class Roster:
    def __init__(self, blocks: SequenceBlocks) -> None:
        self.blocks = blocks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.is_admission_held = False
        """Whoever was preempted comes back when somebody has ended: not into the same shortage."""
        self._num_preempted = 0

    def find(self, req_id: ReqId) -> Sequence | None:
        for sequence in (*self.running, *self.waiting):
            if sequence.req_id == req_id:
                return sequence
        return None

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)

    def start(self, sequence: Sequence) -> None:
        """The first of its blocks are those that are known already."""
        self.blocks.start(sequence)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_rank)
        sequence.is_running = True

    def give_way(self, sequence: Sequence, now_s: float) -> None:
        """Preempt it for somebody else: nobody is admitted in its place at once."""
        self.preempt(sequence, now_s)
        self.is_admission_held = True

    def preempt(self, sequence: Sequence, now_s: float) -> None:
        """From running back to waiting, without its blocks."""
        self.blocks.give_up(sequence, now_s, keep_remote=False)
        self.running.remove(sequence)
        sequence.is_running = False
        self.add(sequence)
        self._num_preempted += 1

    def remove(self, sequence: Sequence, now_s: float) -> None:
        """It has ended, well or not; its prefix may be found again for a while."""
        self.blocks.give_up(sequence, now_s, keep_remote=True)
        if sequence.is_running:
            self.running.remove(sequence)
            sequence.is_running = False
            self.is_admission_held = False
        else:
            self.waiting.remove(sequence)

    def take_num_preempted(self) -> int:
        """Since it was asked last."""
        count, self._num_preempted = self._num_preempted, 0
        return count


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
