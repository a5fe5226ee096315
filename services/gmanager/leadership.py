"""Who leads, as one gManager may believe it at a moment (design 3.1, "two planners").

Pure: the time is an argument. `election` tells it what Redis answers; `server` asks whether to
answer, `planner` whether to plan.

The lease in Redis lasts `lease_s`, but its holder plans only for the first half after a claim was
granted, and, once it has won the lease, not before half a lease is over. So even where Redis forgot
a lease and granted the next one at once, the plans of the two do not overlap.
"""

import enum
import math
from dataclasses import dataclass, replace

from services.common.ids import Term


class Role(enum.Enum):
    LEADER = "leader"
    #: Another leads: every call is refused, and names it.
    FOLLOWER = "follower"
    #: Nobody is known to lead, since Redis does not answer: keeps the map, but plans nothing.
    STAND_IN = "stand-in"


@dataclass(frozen=True, slots=True)
class Claim:
    """What Redis answers to who wants the lease: who has it now, and for how long."""

    is_mine: bool
    leader_address: str
    term: Term
    remaining_s: float


class Leadership:
    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._claim: Claim | None = None
        self._until_s = -math.inf
        self._plans_from_s = math.inf
        self.highest_term = Term(0)
        """Of all that were heard of: the next one must be higher."""

    @classmethod
    def sole(cls, term: Term) -> "Leadership":
        """Of a gManager that has no rival: it leads for ever."""
        leadership = cls(math.inf)
        leadership._claim = Claim(True, "", term, math.inf)
        leadership._until_s, leadership._plans_from_s = math.inf, -math.inf
        return leadership

    def on_claim(self, claim: Claim, asked_at_s: float, now_s: float) -> None:
        """Redis answered at `now_s` what it was asked at `asked_at_s`."""
        is_renewal = claim.is_mine and self._holds(claim.term)
        self._claim = claim
        self.highest_term = max(self.highest_term, claim.term)
        if not claim.is_mine:
            self._until_s = now_s + claim.remaining_s
            return
        # By our clock the lease began when we asked; by that of Redis later.
        self._until_s = asked_at_s + self._lease_s / 2
        if not is_renewal:
            self._plans_from_s = now_s + self._lease_s / 2

    def on_silence(self, now_s: float) -> None:
        """Redis did not answer: a rival is believed to lead until its lease is over."""
        if self._claim is not None and not self._claim.is_mine and now_s >= self._until_s:
            self._claim = None

    def on_term(self, term: Term) -> None:
        """An rManager has heard of this term: in a lower one nothing can be ordered any more."""
        if term <= self.highest_term:
            return
        self.highest_term = term
        if self._claim is None or not self._claim.is_mine:
            return
        # Who has no rival need not ask anybody for a higher one.
        is_sole = self._lease_s == math.inf
        self._claim = replace(self._claim, term=Term(term + 1)) if is_sole else None

    def resign(self) -> None:
        self._claim = None

    def role(self, now_s: float) -> Role:
        if self._claim is None:
            return Role.STAND_IN
        if not self._claim.is_mine:
            return Role.FOLLOWER
        return Role.LEADER if now_s < self._until_s else Role.STAND_IN

    def term(self, now_s: float) -> Term:
        """The term in which we lead; 0 where we do not."""
        if self._claim is None or self.role(now_s) is not Role.LEADER:
            return Term(0)
        return self._claim.term

    def planning_term(self, now_s: float) -> Term | None:
        """The term to give moves; None while none may be ordered."""
        term = self.term(now_s)
        return term if term and now_s >= self._plans_from_s else None

    @property
    def leader_address(self) -> str:
        """Of the rival that leads; empty where none is known."""
        if self._claim is None or self._claim.is_mine:
            return ""
        return self._claim.leader_address

    def _holds(self, term: Term) -> bool:
        return self._claim is not None and self._claim.is_mine and self._claim.term == term
