"""What this instance lends to other owners: reservations, leases, pins. Pure (time is an argument).

A grant is what one `try_move_kvcache` reserved: some blocks, for one request of one owner, under
the owner's move id. It lives until its owner releases it or its lease ends; the lease is renewed by
every received block, every attention call and the owner's own renewals. The creditor may ask for a
grant back (recall), but only the owner ends it: until then it reads there. Blocks that a thread is
reading or writing at that moment are pinned: they return to the pool when the last pin is gone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.kvcache.block_pool import BlockPool
from services.worker.rank import Rank


@dataclass(frozen=True, slots=True)
class Owner:
    """One process start of an owning instance."""

    inst_id: InstId
    incarnation: Incarnation


class GrantState(Enum):
    RESERVED = auto()
    """Blocks are being filled."""
    HELD = auto()
    """Every block arrived and was verified; attention may read them."""
    ENDED = auto()
    """Released or expired; pinned blocks still wait for their last reader."""


@dataclass(slots=True, eq=False)
class Grant:
    owner: Owner
    rank: Rank
    """Of the request that it is for."""
    move_id: MoveId
    block_ids: list[int]
    expires_s: float
    state: GrantState = GrantState.RESERVED
    received: set[int] = field(default_factory=set)
    num_pins: int = 0

    @property
    def req_id(self) -> ReqId:
        return self.rank.req_id

    def is_live(self, now_s: float) -> bool:
        """Neither ended nor overdue, whether or not somebody has swept since."""
        return self.state is not GrantState.ENDED and self.expires_s > now_s


@dataclass(frozen=True, slots=True)
class LentPart:
    """What one request's owner reads here: its grants in block order."""

    grants: tuple[Grant, ...]
    block_ids: list[int]


class Sacrifice(NamedTuple):
    """What has to be given up so that an older request elsewhere can go on."""

    num_recalled: int
    """Blocks to ask back from younger borrowers."""
    num_free: int
    """How many blocks should be free, younger requests of this instance giving way."""


class LendingLedger:
    """All grants of one creditor. Lookups of what is not (any more) there raise LookupError."""

    def __init__(
        self,
        pool: BlockPool,
        keep_free: int,
        lease_s: float,
        max_lent_blocks: int | None = None,
        hold_off_s: float = 0.0,
    ) -> None:
        """`keep_free` blocks are never lent: the instance's own requests must be able to start.

        `hold_off_s`: after a recall nothing is lent for so long, or the same blocks would go to and
        fro.
        """
        self._pool = pool
        self._keep_free = keep_free
        self._lease_s = lease_s
        self._max_lent_blocks = pool.num_blocks if max_lent_blocks is None else max_lent_blocks
        self._hold_off_s = hold_off_s
        self._lend_not_before_s = -inf
        self._held_off_for: Rank | None = None
        self._grants: dict[MoveId, Grant] = {}

    @property
    def lease_s(self) -> float:
        return self._lease_s

    @property
    def num_lent_blocks(self) -> int:
        return sum(len(grant.block_ids) for grant in self._grants.values())

    @property
    def owners(self) -> set[Owner]:
        """Who has something here."""
        return {grant.owner for grant in self._grants.values()}

    def blocks_by_request(self) -> dict[tuple[ReqId, InstId], int]:
        """Blocks held per (request, owner): this creditor's rows of the placement map."""
        rows: dict[tuple[ReqId, InstId], int] = {}
        for grant in self._grants.values():
            key = (grant.req_id, grant.owner.inst_id)
            rows[key] = rows.get(key, 0) + len(grant.block_ids)
        return rows

    def reserve(
        self, owner: Owner, rank: Rank, move_id: MoveId, num_blocks: int, now_s: float
    ) -> Grant | None:
        """First come, first served. The same move id again is the same grant; None is a refusal."""
        known = self._grants.get(move_id)
        if known is not None:
            same = known.owner == owner and known.rank == rank
            return known if same and known.state is not GrantState.ENDED else None
        is_allowed = 0 < num_blocks <= self._max_lent_blocks - self.num_lent_blocks
        if not is_allowed or now_s < self._lend_not_before_s:
            return None
        block_ids = self._pool.try_allocate(num_blocks, self._keep_free)
        if block_ids is None:
            return None
        grant = Grant(owner, rank, move_id, block_ids, now_s + self._lease_s)
        self._grants[move_id] = grant
        return grant

    def begin_receive(self, owner: Owner, move_id: MoveId, index: int, now_s: float) -> int:
        """Pin the grant and name the block that the copy number `index` goes to."""
        grant = self._live(move_id, now_s)
        is_expected = grant.owner == owner and grant.state is GrantState.RESERVED
        if not is_expected or not 0 <= index < len(grant.block_ids):
            raise LookupError(f"move {move_id} does not expect block {index}")
        self._pin(grant, now_s)
        return grant.block_ids[index]

    def end_receive(self, move_id: MoveId, index: int, is_good: bool) -> None:
        grant = self._grants[move_id]
        if is_good and grant.state is GrantState.RESERVED:
            grant.received.add(index)
            if len(grant.received) == len(grant.block_ids):
                grant.state = GrantState.HELD
        self._unpin(grant)

    def open_part(self, owner: Owner, move_ids: Iterable[MoveId], now_s: float) -> LentPart:
        """The blocks that these moves of this owner filled, in that order.

        Which request reads them is the owner's business: several may share a prefix.
        """
        grants = tuple(self._live(move_id, now_s) for move_id in move_ids)
        for grant in grants:
            if grant.owner != owner or grant.state is not GrantState.HELD:
                raise LookupError(f"move {grant.move_id} is not a held part of this owner")
        return LentPart(grants, [block for grant in grants for block in grant.block_ids])

    def begin_use(self, part: LentPart, now_s: float) -> None:
        """Pin every grant of the part and renew its lease, or raise and pin nothing."""
        for grant in part.grants:
            if self._live(grant.move_id, now_s) is not grant:
                raise LookupError(f"move {grant.move_id} was replaced")
        for grant in part.grants:
            self._pin(grant, now_s)

    def end_use(self, part: LentPart) -> None:
        for grant in part.grants:
            self._unpin(grant)

    def renew(self, owner: Owner, move_ids: Iterable[MoveId], now_s: float) -> list[MoveId]:
        """Renew the grants of these moves; returns the moves of which nothing is held."""
        lost = []
        for move_id in move_ids:
            grant = self._grants.get(move_id)
            if grant is None or grant.owner != owner or not grant.is_live(now_s):
                lost.append(move_id)
            else:
                grant.expires_s = now_s + self._lease_s
        return lost

    def release(self, owner: Owner, move_id: MoveId) -> int:
        """End the grant of one move. Idempotent; returns the blocks ended."""
        grant = self._grants.get(move_id)
        if grant is None or grant.owner != owner or grant.state is GrantState.ENDED:
            return 0
        self._end(grant)
        return len(grant.block_ids)

    def sacrifice_for(self, claimant: Rank, num_blocks: int, now_s: float) -> Sacrifice:
        """Loans to younger requests come before requests of this instance's own.

        Ends the hold-off if it was for somebody younger: the claimant goes first.
        """
        if self._held_off_for is not None and claimant <= self._held_off_for:
            self._lend_not_before_s = -inf
        num_younger = self.num_recallable_blocks(now_s, claimant)
        num_unlent = self._max_lent_blocks - self.num_lent_blocks
        num_blocks = min(num_blocks, num_unlent + num_younger)
        num_free = self._pool.num_free
        num_missing = max(0, num_blocks + self._keep_free - num_free) if num_blocks > 0 else 0
        num_recalled = min(num_younger, max(num_missing, num_blocks - num_unlent))
        return Sacrifice(max(0, num_recalled), num_free + max(0, num_missing - num_recalled))

    def num_recallable_blocks(self, now_s: float, claimant: Rank | None = None) -> int:
        """With a claimant: only of those who are younger. What is still being filled included."""
        held = (g for g in self._held(now_s) if claimant is None or claimant < g.rank)
        return sum(len(grant.block_ids) for grant in (*held, *self._unfilled(claimant)))

    def oldest_borrower(self) -> Rank | None:
        live = (grant for grant in self._grants.values() if grant.state is not GrantState.ENDED)
        return min(map(_rank, live), default=None)

    def recall(self, num_blocks: int, now_s: float, claimant: Rank | None = None) -> list[Grant]:
        """Which grants to ask back, the youngest requests' first, until they have `num_blocks`.

        They stay readable until their owners release them; who asks again is told the same ones.
        What younger requests are still filling ends at once, since its owners have all of it.
        Without a claimant the instance itself is going to end.
        """
        self._lend_not_before_s = now_s + self._hold_off_s
        self._held_off_for = claimant
        for grant in self._unfilled(claimant):
            if num_blocks <= 0:
                break
            self._end(grant)
            num_blocks -= len(grant.block_ids)
        chosen = []
        newest_first = self._held(now_s)[::-1]
        for grant in sorted(newest_first, key=_rank, reverse=True):
            if num_blocks <= 0:
                break
            chosen.append(grant)
            num_blocks -= len(grant.block_ids)
        return chosen

    def end_unfilled(self) -> None:
        """No more is to come: what is still being filled ends, since its owners have all of it."""
        for grant in self._unfilled(None):
            self._end(grant)

    def expire(self, now_s: float) -> list[Grant]:
        """End every grant whose lease is over."""
        unended = (g for g in self._grants.values() if g.state is not GrantState.ENDED)
        overdue = [grant for grant in unended if not grant.is_live(now_s)]
        for grant in overdue:
            self._end(grant)
        return overdue

    def _held(self, now_s: float) -> list[Grant]:
        """Oldest first."""
        return [
            grant
            for grant in self._grants.values()
            if grant.state is GrantState.HELD and grant.is_live(now_s)
        ]

    def _unfilled(self, claimant: Rank | None) -> list[Grant]:
        """The youngest first; with a claimant only of those who are younger."""
        unfilled = (g for g in self._grants.values() if g.state is GrantState.RESERVED)
        younger = (g for g in unfilled if claimant is None or claimant < g.rank)
        return sorted(younger, key=_rank, reverse=True)

    def _live(self, move_id: MoveId, now_s: float) -> Grant:
        grant = self._grants.get(move_id)
        if grant is None or not grant.is_live(now_s):
            raise LookupError(f"nothing is held under move {move_id}")
        return grant

    def _pin(self, grant: Grant, now_s: float) -> None:
        grant.num_pins += 1
        grant.expires_s = now_s + self._lease_s

    def _unpin(self, grant: Grant) -> None:
        grant.num_pins -= 1
        if grant.state is GrantState.ENDED and grant.num_pins == 0:
            self._forget(grant)

    def _end(self, grant: Grant) -> None:
        grant.state = GrantState.ENDED
        if grant.num_pins == 0:
            self._forget(grant)

    def _forget(self, grant: Grant) -> None:
        del self._grants[grant.move_id]
        self._pool.free(grant.block_ids)


def _rank(grant: Grant) -> Rank:
    return grant.rank
