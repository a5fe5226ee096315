"""The lending ledger for many threads: one lock, one monotonic clock, errors of the wire.

Called by the rManager (reserve, renew, recall, release, expire) and by the creditor's connection
threads (receive a block, read a part).
"""

import threading
from collections.abc import Callable, Iterable

from services.common.errors import PartLost
from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.kvcache.lending import Grant, LendingLedger, LentPart, Owner, Sacrifice
from services.worker.rank import Rank


class Lender:
    """Thread-safe façade over one LendingLedger. What is not there raises PartLost(me)."""

    def __init__(self, me: InstId, ledger: LendingLedger, clock: Callable[[], float]) -> None:
        self._me = me
        self._ledger = ledger
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def lease_s(self) -> float:
        return self._ledger.lease_s

    @property
    def num_lent_blocks(self) -> int:
        with self._lock:
            return self._ledger.num_lent_blocks

    @property
    def num_recallable_blocks(self) -> int:
        """What could be had back, and read by the scheduler at every step."""
        with self._lock:
            return self._ledger.num_recallable_blocks(self._clock())

    @property
    def oldest_borrower(self) -> Rank | None:
        with self._lock:
            return self._ledger.oldest_borrower()

    @property
    def owners(self) -> set[Owner]:
        with self._lock:
            return self._ledger.owners

    def recall(self, num_blocks: int, claimant: Rank | None = None) -> list[Grant]:
        with self._lock:
            return self._ledger.recall(num_blocks, self._clock(), claimant)

    def sacrifice_for(self, claimant: Rank, num_blocks: int) -> Sacrifice:
        with self._lock:
            return self._ledger.sacrifice_for(claimant, num_blocks, self._clock())

    def blocks_by_request(self) -> dict[tuple[ReqId, InstId], int]:
        with self._lock:
            return self._ledger.blocks_by_request()

    def reserve(self, owner: Owner, rank: Rank, move_id: MoveId, num_blocks: int) -> Grant | None:
        with self._lock:
            return self._ledger.reserve(owner, rank, move_id, num_blocks, self._clock())

    def begin_receive(
        self,
        owner_inst_id: InstId,
        owner_incarnation: Incarnation,
        move_id: MoveId,
        index: int,
    ) -> int:
        owner = Owner(owner_inst_id, owner_incarnation)
        with self._lock:
            try:
                return self._ledger.begin_receive(owner, move_id, index, self._clock())
            except LookupError as error:
                raise PartLost(self._me, str(error)) from error

    def end_receive(self, move_id: MoveId, index: int, ok: bool) -> None:
        with self._lock:
            self._ledger.end_receive(move_id, index, ok)

    def open_part(
        self,
        owner_inst_id: InstId,
        owner_incarnation: Incarnation,
        move_ids: tuple[MoveId, ...],
    ) -> LentPart:
        owner = Owner(owner_inst_id, owner_incarnation)
        with self._lock:
            try:
                return self._ledger.open_part(owner, move_ids, self._clock())
            except LookupError as error:
                raise PartLost(self._me, str(error)) from error

    def begin_use(self, part: LentPart) -> None:
        with self._lock:
            try:
                self._ledger.begin_use(part, self._clock())
            except LookupError as error:
                raise PartLost(self._me, str(error)) from error

    def end_use(self, part: LentPart) -> None:
        with self._lock:
            self._ledger.end_use(part)

    def renew(self, owner: Owner, move_ids: Iterable[MoveId]) -> list[MoveId]:
        with self._lock:
            return self._ledger.renew(owner, move_ids, self._clock())

    def release(self, owner: Owner, move_id: MoveId) -> int:
        with self._lock:
            return self._ledger.release(owner, move_id)

    def end_unfilled(self) -> None:
        with self._lock:
            self._ledger.end_unfilled()

    def expire(self) -> list[Grant]:
        with self._lock:
            return self._ledger.expire(self._clock())
