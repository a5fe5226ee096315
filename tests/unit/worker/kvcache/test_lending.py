"""The creditor's ledger: every state of a grant against every event, and no block ever lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.lending import Grant, GrantState, LendingLedger, LentPart, Owner
from services.worker.rank import Rank

OWNER = Owner(InstId(1), Incarnation(11))
OTHER = Owner(InstId(1), Incarnation(12))
RANK, MOVE = Rank(0, 1.0, ReqId(5)), MoveId(50)
LEASE_S = 10.0


HOLD_OFF_S = 3.0


def ledger_of(num_blocks: int = 8, keep_free: int = 1) -> tuple[LendingLedger, BlockPool]:
    pool = BlockPool(num_blocks)
    return LendingLedger(pool, keep_free, LEASE_S, hold_off_s=HOLD_OFF_S), pool


def fill(ledger: LendingLedger, grant: Grant, now_s: float = 0.0) -> None:
    for index in range(len(grant.block_ids)):
        assert ledger.begin_receive(OWNER, grant.move_id, index, now_s) == grant.block_ids[index]
        ledger.end_receive(grant.move_id, index, True)


def held(ledger: LendingLedger, num_blocks: int = 2, move: MoveId = MOVE) -> LentPart:
    grant = ledger.reserve(OWNER, RANK, move, num_blocks, 0.0)
    assert grant is not None
    fill(ledger, grant)
    return ledger.open_part(OWNER, [move], 0.0)


def test_reservations_are_first_come_first_served() -> None:
    ledger, pool = ledger_of()
    assert ledger.reserve(OWNER, RANK, MOVE, 5, 0.0) is not None
    assert ledger.reserve(OTHER, RANK._replace(req_id=ReqId(6)), MoveId(51), 3, 0.0) is None
    assert ledger.reserve(OTHER, RANK._replace(req_id=ReqId(6)), MoveId(51), 2, 0.0) is not None
    assert pool.num_free == 1


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_reservation_of_nothing_is_refused(num_blocks: int) -> None:
    ledger, _ = ledger_of()
    assert ledger.reserve(OWNER, RANK, MOVE, num_blocks, 0.0) is None


def test_a_duplicate_reservation_is_the_same_grant() -> None:
    ledger, pool = ledger_of()
    first = ledger.reserve(OWNER, RANK, MOVE, 2, 0.0)
    assert ledger.reserve(OWNER, RANK, MOVE, 2, 1.0) is first
    assert ledger.reserve(OTHER, RANK, MOVE, 2, 1.0) is None
    assert pool.num_free == 6


def test_a_part_can_be_read_only_when_every_block_arrived() -> None:
    ledger, _ = ledger_of()
    grant = ledger.reserve(OWNER, RANK, MOVE, 2, 0.0)
    assert grant is not None
    ledger.begin_receive(OWNER, MOVE, 0, 0.0)
    ledger.end_receive(MOVE, 0, True)
    ledger.begin_receive(OWNER, MOVE, 1, 0.0)
    ledger.end_receive(MOVE, 1, False)  # bad checksum
    with pytest.raises(LookupError):
        ledger.open_part(OWNER, [MOVE], 0.0)
    ledger.begin_receive(OWNER, MOVE, 1, 0.0)
    ledger.end_receive(MOVE, 1, True)
    assert ledger.open_part(OWNER, [MOVE], 0.0).block_ids == grant.block_ids


@pytest.mark.parametrize("index", [-1, 2])
def test_a_copy_beyond_the_reservation_is_refused(index: int) -> None:
    ledger, _ = ledger_of()
    ledger.reserve(OWNER, RANK, MOVE, 2, 0.0)
    with pytest.raises(LookupError):
        ledger.begin_receive(OWNER, MOVE, index, 0.0)


def test_no_more_is_lent_than_the_cap() -> None:
    ledger = LendingLedger(BlockPool(8), 1, LEASE_S, max_lent_blocks=3)
    assert ledger.reserve(OWNER, RANK, MoveId(1), 2, 0.0) is not None
    assert ledger.reserve(OWNER, RANK, MoveId(2), 2, 0.0) is None
    assert ledger.reserve(OWNER, RANK, MoveId(3), 1, 0.0) is not None
    ledger.release(OWNER, MoveId(1))
    assert ledger.reserve(OWNER, RANK, MoveId(4), 2, 0.0) is not None


def test_a_held_grant_takes_no_more_copies() -> None:
    ledger, _ = ledger_of()
    held(ledger)
    with pytest.raises(LookupError):
        ledger.begin_receive(OWNER, MOVE, 0, 0.0)


@pytest.mark.parametrize(
    ("owner", "moves"), [(OTHER, [MOVE]), (OWNER, [MoveId(99)]), (OWNER, [MOVE, MoveId(99)])]
)
def test_a_part_of_somebody_else_cannot_be_opened(owner: Owner, moves: list[MoveId]) -> None:
    ledger, _ = ledger_of()
    held(ledger)
    with pytest.raises(LookupError):
        ledger.open_part(owner, moves, 0.0)


def test_a_part_spans_several_moves_in_their_order() -> None:
    ledger, _ = ledger_of()
    first = held(ledger, 2)
    second = held(ledger, 1, MoveId(51))
    part = ledger.open_part(OWNER, [MOVE, MoveId(51)], 0.0)
    assert part.block_ids == first.block_ids + second.block_ids


def test_an_unused_lease_ends_and_use_renews_it() -> None:
    ledger, pool = ledger_of()
    part = held(ledger)
    ledger.begin_use(part, 9.0)
    ledger.end_use(part)
    assert ledger.expire(18.9) == []
    ledger.begin_use(part, 18.9)
    ledger.end_use(part)
    assert [grant.move_id for grant in ledger.expire(28.9)] == [MOVE]
    assert pool.num_free == 8
    with pytest.raises(LookupError):
        ledger.begin_use(part, 28.9)


def test_an_overdue_lease_is_over_before_anybody_swept() -> None:
    ledger, _ = ledger_of()
    part = held(ledger)
    with pytest.raises(LookupError):
        ledger.begin_use(part, LEASE_S)


def test_the_owner_renews_its_own_moves_only() -> None:
    ledger, _ = ledger_of()
    held(ledger)
    assert ledger.renew(OWNER, [MOVE, MoveId(99)], 5.0) == [MoveId(99)]
    assert ledger.renew(OTHER, [MOVE], 5.0) == [MOVE]
    assert ledger.expire(14.9) == []


def test_a_renewal_does_not_revive_what_is_over() -> None:
    ledger, _ = ledger_of()
    held(ledger)
    assert ledger.renew(OWNER, [MOVE], LEASE_S) == [MOVE]


def test_a_stranger_s_copy_is_refused() -> None:
    ledger, _ = ledger_of()
    ledger.reserve(OWNER, RANK, MOVE, 2, 0.0)
    with pytest.raises(LookupError):
        ledger.begin_receive(OTHER, MOVE, 0, 0.0)


def test_a_released_block_stays_pinned_until_its_last_reader_left() -> None:
    ledger, pool = ledger_of()
    part = held(ledger)
    ledger.begin_use(part, 0.0)
    assert ledger.release(OWNER, MOVE) == 2
    assert pool.num_free == 6
    assert ledger.reserve(OWNER, RANK, MOVE, 2, 0.0) is None  # a late duplicate revives nothing
    ledger.end_use(part)
    assert pool.num_free == 8


def test_a_release_during_a_copy_waits_for_the_copy() -> None:
    ledger, pool = ledger_of()
    ledger.reserve(OWNER, RANK, MOVE, 1, 0.0)
    ledger.begin_receive(OWNER, MOVE, 0, 0.0)
    ledger.release(OWNER, MOVE)
    assert pool.num_free == 7
    ledger.end_receive(MOVE, 0, True)
    assert pool.num_free == 8


def test_release_is_idempotent_and_names_one_move_of_its_owner() -> None:
    ledger, pool = ledger_of()
    held(ledger, 2)
    held(ledger, 1, MoveId(51))
    assert ledger.release(OTHER, MOVE) == 0
    assert ledger.release(OWNER, MOVE) == 2
    assert ledger.release(OWNER, MOVE) == 0
    assert ledger.blocks_by_request() == {(RANK.req_id, InstId(1)): 1}
    assert ledger.release(OWNER, MoveId(51)) == 1
    assert pool.num_free == 8


def test_use_pins_all_of_a_part_or_nothing() -> None:
    ledger, pool = ledger_of()
    held(ledger, 2)
    held(ledger, 1, MoveId(51))
    part = ledger.open_part(OWNER, [MOVE, MoveId(51)], 0.0)
    ledger.release(OWNER, MoveId(51))
    with pytest.raises(LookupError):
        ledger.begin_use(part, 0.0)
    ledger.release(OWNER, MOVE)
    assert pool.num_free == 8


def moves_of(grants: list[Grant]) -> list[MoveId]:
    return [grant.move_id for grant in grants]


def test_what_was_lent_last_is_called_back_first_and_no_more_than_is_wanted() -> None:
    ledger, _ = ledger_of()
    for move, num_blocks in ((50, 2), (51, 1), (52, 3)):
        held(ledger, num_blocks, MoveId(move))
    assert ledger.num_recallable_blocks(0.0) == 6
    assert moves_of(ledger.recall(3, 0.0)) == [52]
    assert moves_of(ledger.recall(4, 0.0)) == [52, 51]
    assert moves_of(ledger.recall(99, 0.0)) == [52, 51, 50]
    assert ledger.recall(0, 0.0) == []


def test_a_recall_that_is_repeated_names_the_same_until_they_are_released() -> None:
    ledger, _ = ledger_of()
    held(ledger, 2)
    held(ledger, 2, MoveId(51))
    assert moves_of(ledger.recall(2, 0.0)) == moves_of(ledger.recall(2, 1.0)) == [51]
    ledger.release(OWNER, MoveId(51))
    assert moves_of(ledger.recall(2, 2.0)) == [MOVE]


def test_a_recalled_grant_is_held_until_its_owner_releases_it() -> None:
    """Every event that a held grant knows, after the recall: nothing has changed for the owner."""
    ledger, pool = ledger_of()
    part = held(ledger)
    ledger.recall(2, 0.0)
    ledger.begin_use(part, 5.0)  # attention and the way back read it
    ledger.end_use(part)
    assert ledger.open_part(OWNER, [MOVE], 5.0).block_ids == part.block_ids
    assert ledger.renew(OWNER, [MOVE], 6.0) == []
    assert ledger.reserve(OWNER, RANK, MOVE, 2, 6.0) is part.grants[0]
    with pytest.raises(LookupError):
        ledger.begin_receive(OWNER, MOVE, 0, 6.0)
    assert ledger.release(OTHER, MOVE) == 0
    assert pool.num_free == 6
    assert ledger.release(OWNER, MOVE) == 2
    assert ledger.release(OWNER, MOVE) == 0  # a late duplicate
    assert pool.num_free == 8


def test_the_lease_of_a_recalled_grant_ends_as_any_other() -> None:
    ledger, pool = ledger_of()
    held(ledger)
    ledger.recall(2, 5.0)
    assert moves_of(ledger.expire(LEASE_S)) == [MOVE]
    assert pool.num_free == 8


def test_nothing_can_be_called_back_that_no_owner_could_give() -> None:
    ledger, _ = ledger_of()
    assert ledger.recall(5, 0.0) == []  # nothing lent
    ledger = ledger_of()[0]
    grant = ledger.reserve(OWNER, RANK, MOVE, 2, 0.0)
    assert grant is not None
    fill(ledger, grant)
    assert ledger.recall(5, LEASE_S) == []  # overdue, whether or not somebody has swept
    part = ledger.open_part(OWNER, [MOVE], 1.0)
    ledger.begin_use(part, 1.0)
    ledger.release(OWNER, MOVE)
    assert ledger.recall(5, 1.0) == []  # ended, and pinned by its last reader
    assert ledger.num_recallable_blocks(1.0) == 0
    ledger.end_use(part)


def test_what_is_still_being_filled_can_be_ended_and_what_is_held_stays() -> None:
    ledger, pool = ledger_of()
    held(ledger, 2)
    grant = ledger.reserve(OWNER, RANK, MoveId(51), 2, 0.0)
    assert grant is not None
    ledger.begin_receive(OWNER, MoveId(51), 0, 0.0)
    ledger.end_unfilled()
    assert pool.num_free == 4  # a block is being received
    ledger.end_receive(MoveId(51), 0, True)
    assert pool.num_free == 6
    with pytest.raises(LookupError):
        ledger.begin_receive(OWNER, MoveId(51), 1, 0.0)
    assert ledger.renew(OWNER, [MOVE], 0.0) == []


def test_what_a_younger_request_is_still_filling_goes_before_what_is_held() -> None:
    """Its owner has all of it, so that nothing has to be brought back."""
    ledger, pool = ledger_of()
    oldest = lent_to(ledger, 50, 1, arrived_at_s=2.0)
    lent_to(ledger, 51, 2, arrived_at_s=6.0)
    for move, arrived_at_s in ((52, 3.0), (53, 5.0)):
        assert ledger.reserve(OWNER, Rank(0, arrived_at_s, ReqId(move)), MoveId(move), 2, 0.0)
    claimant = Rank(0, 4.0, ReqId(1))
    assert ledger.num_recallable_blocks(0.0, claimant) == 4
    assert ledger.recall(2, 0.0, claimant) == []
    assert pool.num_free == 3
    with pytest.raises(LookupError):
        ledger.begin_receive(OWNER, MoveId(53), 0, 0.0)
    ledger.begin_receive(OWNER, MoveId(52), 0, 0.0)  # of an older one: goes on
    assert moves_of(ledger.recall(2, 0.0, claimant)) == [51]
    assert ledger.oldest_borrower() == oldest


def test_after_a_recall_nothing_is_lent_for_a_while() -> None:
    ledger, _ = ledger_of()
    held(ledger)
    ledger.recall(1, 1.0)
    ledger.release(OWNER, MOVE)
    assert ledger.reserve(OWNER, RANK, MoveId(51), 1, 1.0) is None
    ledger.recall(1, 2.0)  # wanted still: the time counts from here
    assert ledger.reserve(OWNER, RANK, MoveId(51), 1, 2.0 + HOLD_OFF_S - 0.1) is None
    assert ledger.reserve(OWNER, RANK, MoveId(51), 1, 2.0 + HOLD_OFF_S) is not None


def lent_to(ledger: LendingLedger, move: int, num_blocks: int, arrived_at_s: float) -> Rank:
    rank = Rank(0, arrived_at_s, ReqId(move))
    grant = ledger.reserve(OWNER, rank, MoveId(move), num_blocks, 0.0)
    assert grant is not None
    fill(ledger, grant)
    return rank


def test_the_youngest_request_s_part_is_called_back_first() -> None:
    ledger, _ = ledger_of()
    oldest = lent_to(ledger, 50, 1, arrived_at_s=2.0)
    lent_to(ledger, 51, 2, arrived_at_s=4.0)
    lent_to(ledger, 52, 2, arrived_at_s=3.0)
    assert ledger.oldest_borrower() == oldest
    assert moves_of(ledger.recall(5, 0.0)) == [51, 52, 50]
    assert ledger.num_recallable_blocks(0.0, Rank(0, 2.5, ReqId(1))) == 4


def test_for_an_older_request_loans_to_younger_ones_go_before_own_requests() -> None:
    ledger, pool = ledger_of(num_blocks=12)
    lent_to(ledger, 50, 2, arrived_at_s=2.0)
    lent_to(ledger, 51, 3, arrived_at_s=4.0)
    own = pool.try_allocate(5)
    assert own is not None and pool.num_free == 2
    claimant = Rank(0, 3.0, ReqId(1))
    # One is kept, so one is there already.
    assert ledger.sacrifice_for(claimant, 1, 0.0) == (0, 2)
    assert ledger.sacrifice_for(claimant, 4, 0.0) == (3, 2)
    assert ledger.sacrifice_for(claimant, 6, 0.0) == (3, 4)
    assert ledger.sacrifice_for(Rank(0, 5.0, ReqId(1)), 4, 0.0) == (0, 5)


def test_nobody_makes_a_sacrifice_for_what_may_not_be_lent() -> None:
    ledger = LendingLedger(BlockPool(12), 1, LEASE_S, max_lent_blocks=4)
    lent_to(ledger, 50, 2, arrived_at_s=1.0)
    lent_to(ledger, 51, 2, arrived_at_s=9.0)
    claimant = Rank(0, 3.0, ReqId(1))
    assert ledger.sacrifice_for(claimant, 9, 0.0) == (2, 8)  # the younger one's part, no more
    ledger.release(OWNER, MoveId(51))
    lent_to(ledger, 52, 2, arrived_at_s=1.0)
    assert ledger.sacrifice_for(claimant, 9, 0.0) == (0, 8)


def test_what_is_held_off_for_a_younger_request_is_lent_to_an_older_one() -> None:
    ledger, _ = ledger_of()
    younger = Rank(0, 5.0, ReqId(9))
    lent_to(ledger, 50, 2, arrived_at_s=7.0)
    ledger.recall(2, 0.0, younger)
    ledger.sacrifice_for(Rank(0, 6.0, ReqId(2)), 1, 0.0)
    assert ledger.reserve(OWNER, RANK, MoveId(51), 1, 0.0) is None
    ledger.sacrifice_for(Rank(0, 4.0, ReqId(2)), 1, 0.0)
    assert ledger.reserve(OWNER, RANK, MoveId(51), 1, 0.0) is not None


def test_a_copy_that_has_begun_before_a_recall_may_end() -> None:
    ledger, _ = ledger_of()
    grant = ledger.reserve(OWNER, RANK, MOVE, 2, 0.0)
    assert grant is not None
    ledger.recall(8, 0.0, RANK._replace(arrived_at_s=5.0))  # younger than the copy's request
    fill(ledger, grant, 1.0)
    assert moves_of(ledger.recall(8, 1.0)) == [MOVE]


class LedgerMachine(RuleBasedStateMachine):
    """Random events in any order; what is lent plus what is free is always everything."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.pool = ledger_of(num_blocks=12)
        self.now_s = 0.0
        self.copying: list[tuple[MoveId, int]] = []
        self.using: list[LentPart] = []

    moves = st.integers(1, 4).map(MoveId)

    @rule(move=moves, num_blocks=st.integers(1, 5))
    def reserve(self, move: MoveId, num_blocks: int) -> None:
        self.ledger.reserve(OWNER, Rank(0, 1.0, ReqId(move % 2)), move, num_blocks, self.now_s)

    @rule(move=moves, index=st.integers(0, 4))
    def begin_copy(self, move: MoveId, index: int) -> None:
        try:
            self.ledger.begin_receive(OWNER, move, index, self.now_s)
        except LookupError:
            return
        self.copying.append((move, index))

    @precondition(lambda self: self.copying)
    @rule(is_good=st.booleans())
    def end_copy(self, is_good: bool) -> None:
        move, index = self.copying.pop(0)
        self.ledger.end_receive(move, index, is_good)

    @rule(move=moves)
    def begin_use(self, move: MoveId) -> None:
        try:
            part = self.ledger.open_part(OWNER, [move], self.now_s)
            self.ledger.begin_use(part, self.now_s)
        except LookupError:
            return
        self.using.append(part)

    @precondition(lambda self: self.using)
    @rule()
    def end_use(self) -> None:
        self.ledger.end_use(self.using.pop(0))

    @rule(move=moves)
    def release(self, move: MoveId) -> None:
        self.ledger.release(OWNER, move)

    @rule(num_blocks=st.integers(0, 12))
    def recall(self, num_blocks: int) -> None:
        lendable = self.ledger.num_recallable_blocks(self.now_s)
        grants = self.ledger.recall(num_blocks, self.now_s)
        num_left = self.ledger.num_recallable_blocks(self.now_s)
        assert sum(len(g.block_ids) for g in grants) >= min(
            num_blocks - (lendable - num_left), num_left
        )
        assert all(g.state is GrantState.HELD and g.is_live(self.now_s) for g in grants)

    @rule()
    def end_unfilled(self) -> None:
        self.ledger.end_unfilled()

    @rule(elapsed_s=st.floats(0.1, 12.0))
    def let_time_pass(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.ledger.expire(self.now_s)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        assert self.pool.num_free + self.ledger.num_lent_blocks == 12
        self.pool.check_integrity()

    @invariant()
    def blocks_in_use_are_not_free(self) -> None:
        for part in self.using:
            assert all(self.pool._holders[block] for block in part.block_ids)

    def teardown(self) -> None:
        while self.copying:
            self.end_copy(True)
        while self.using:
            self.end_use()
        self.ledger.expire(self.now_s + 2 * LEASE_S)
        assert self.pool.num_free == 12


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
