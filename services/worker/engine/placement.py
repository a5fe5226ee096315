"""Where the blocks of the running sequences lie: moves to creditors, recalls, losses. Pure.

The rManager carries out moves and recalls and tells the outcome here, between two steps.
"""

from collections.abc import Collection

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.roster import Roster
from services.worker.engine.sequence import MoveOrder, Sequence
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rank import Rank


class Placement:
    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self.num_recomputed = 0
        """Sequences that lost a part; since the start."""
        self._config = config
        self._roster = roster
        self._blocks = roster.blocks
        self._lend_not_before_s = 0.0

    # -- moves ------------------------------------------------------------------------------------

    def may_lend(self, now_s: float) -> bool:
        """Not for a while after creditors refused."""
        return now_s >= self._lend_not_before_s

    def missing_to_grow(self) -> tuple[int, Rank | None]:
        """Blocks that the running sequences will lack before each has filled one block more, and
        the highest in rank of those who lack some."""
        num_left, first = self._blocks.pool.num_free, None
        for sequence in self._roster.running:
            num_tokens = sequence.num_tokens + self._config.block_size
            num_left -= sequence.table.blocks_to_reach(num_tokens)
            if num_left < 0 and first is None:
                first = sequence.rank
        return max(0, -num_left), first

    @property
    def is_moving(self) -> bool:
        return any(sequence.is_moving for sequence in self._roster.running)

    def longest_movable(self) -> Sequence | None:
        """The sequence with the most blocks that could move now."""
        running = self._roster.running
        longest = max(running, key=lambda seq: len(seq.movable_blocks), default=None)
        return longest if longest is not None and longest.movable_blocks else None

    def num_movable(self, req_id: ReqId) -> int:
        """Blocks of a sequence that could move now."""
        sequence = self._roster.find(req_id)
        return 0 if sequence is None else len(sequence.movable_blocks)

    def begin_move(
        self, req_id: ReqId, num_blocks: int, claimant: Rank | None = None
    ) -> MoveOrder | None:
        """Take the oldest movable blocks of a sequence for a move; None if there are none."""
        sequence = self._roster.find(req_id)
        if sequence is None or not sequence.movable_blocks or num_blocks < 1:
            return None
        num_blocks = min(num_blocks, self._config.max_move_blocks)
        return self._blocks.begin_move(sequence, num_blocks, claimant)

    def is_current(self, order: MoveOrder) -> bool:
        """Whether the order's blocks are still those of its sequence."""
        return self._sequence_of(order) is not None

    def commit_move(self, order: MoveOrder, span: RemoteSpan) -> bool:
        """Between two steps: the creditor's copy becomes the truth and the local blocks are free.

        False if the sequence is gone or gave its blocks up meanwhile; then the copy is void.
        """
        sequence = self._sequence_of(order)
        return sequence is not None and self._blocks.commit_move(sequence, span)

    def end_move(self, order: MoveOrder, was_refused: bool, now_s: float) -> None:
        """The move is over, committed or not."""
        sequence = self._sequence_of(order)
        if sequence is None:
            return  # void: whatever came of it says nothing about creditors
        sequence.order = 0
        if was_refused:
            self._lend_not_before_s = now_s + self._config.lend_retry_s
            self._blocks.drop_idle_remote()

    def _sequence_of(self, order: MoveOrder) -> Sequence | None:
        """None once the order is over, or its sequence has given up the blocks that it names."""
        sequence = self._roster.find(order.req_id)
        return sequence if sequence is not None and sequence.order == order.number else None

    # -- giving way to instances elsewhere --------------------------------------------------------

    def give_way(self, claimant: Rank, num_blocks: int, now_s: float) -> None:
        """Preempt the youngest until so many blocks are free; nobody older than the claimant."""
        running = self._roster.running
        while self._blocks.pool.num_free < num_blocks and running and claimant < running[-1].rank:
            self._roster.give_way(running[-1], now_s)

    def make_room(self, span: RemoteSpan, claimant: Rank | None, now_s: float) -> list[int] | None:
        """Local blocks for what a creditor wants back, if none are free from who gives way.

        None once nobody uses the span any more, or if only those older than the claimant could give
        way; without a claimant everybody does.
        """
        while self._blocks.is_used(span):
            block_ids = self._blocks.pool.try_allocate(span.num_blocks)
            if block_ids is not None:
                return block_ids
            sequence = self._gives_way_for(span, claimant)
            if sequence is None:
                return None
            self._roster.give_way(sequence, now_s)
        return None

    def _gives_way_for(self, span: RemoteSpan, claimant: Rank | None) -> Sequence | None:
        """The lowest in rank; but where all below the span's first user and the claimant have too
        little together, they would do so in vain, and its last user does at once."""
        running = self._roster.running
        users = [sequence for sequence in running if span in sequence.table.remote]
        num_above = running.index(users[0]) + 1
        if claimant is not None:
            num_above = max(num_above, sum(sequence.rank < claimant for sequence in running))
        above, below = (
            {block for sequence in part for block in sequence.table.local}
            for part in (running[:num_above], running[num_above:])
        )
        if self._blocks.pool.num_free + len(below - above) >= span.num_blocks:
            return running[-1]
        return users[-1] if claimant is None or claimant < users[0].rank else None

    def rank_of(self, span: RemoteSpan) -> Rank | None:
        """Of the oldest who reads the span; None if nobody does."""
        readers = (seq.rank for seq in self._roster.running if span in seq.table.remote)
        return min(readers, default=None)

    def take_back(self, span: RemoteSpan, block_ids: list[int]) -> bool:
        """These blocks become the truth for all who used the span; False if nobody does now."""
        return self._blocks.take_back(self._roster.running, span, block_ids)

    def lend_on(self, span: RemoteSpan, by: list[RemoteSpan]) -> bool:
        """Other creditors' copies become the truth for all who used the span."""
        return self._blocks.lend_on(self._roster.running, span, by)

    # -- losses -----------------------------------------------------------------------------------

    def lose_parts(
        self,
        inst_id: InstId,
        move_ids: Collection[MoveId] | None = None,
        incarnation: Incarnation | None = None,
    ) -> int:
        """What `inst_id` held (all, or these moves, or since this start) is to be computed again;
        of how many."""

        def is_lost(span: RemoteSpan) -> bool:
            return (
                span.inst_id == inst_id
                and (move_ids is None or span.move_id in move_ids)
                and incarnation in (None, span.incarnation)
            )

        num_hurt = self._blocks.lose(self._roster.running, is_lost)
        self.num_recomputed += num_hurt
        return num_hurt
