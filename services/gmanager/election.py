"""Takes part in the election of the leader, and begins or gives up the map as it turns out.

Built and run by `__main__`; `server` asks whether to answer, `planner` in which term to plan.
Without a lease there is no rival, and this gManager leads for ever.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.common.errors import NotLeader
from services.common.ids import Term
from services.gmanager.cluster import Cluster
from services.gmanager.keeper import MapKeeper
from services.gmanager.leadership import Claim, Leadership, Role
from services.gmanager.metrics import GManagerMetrics

_log = logging.getLogger(__name__)


class Lease(Protocol):
    """What decides who leads: `redis_lease`, or a test."""

    period_s: float
    """How often to claim."""

    async def claim(self, known_term: Term) -> Claim | None:
        """Who has it now; None where nobody says."""

    async def release(self) -> None:
        """Whoever comes next may have it."""


class Election:
    def __init__(
        self,
        leadership: Leadership,
        keeper: MapKeeper,
        load: Callable[[float], Awaitable[Cluster]],
        metrics: GManagerMetrics,
        lease: Lease | None,
    ) -> None:
        """`load`: what the last leader knew, as far as Redis tells."""
        self._leadership = leadership
        self._keeper = keeper
        self._load = load
        self._metrics = metrics
        self._lease = lease
        self._role: Role | None = None

    async def run(self) -> None:
        """Claims the lease again and again until cancelled; nothing to do where there is none."""
        while self._lease is not None:
            await asyncio.sleep(self._lease.period_s)
            try:
                await self.step()
            except Exception:
                _log.exception("election failed")

    async def step(self) -> None:
        """Asks Redis who leads, and acts on it."""
        if self._lease is not None:
            await self._ask(self._lease)
        role = self._leadership.role(self._keeper.clock())
        if role is not self._role:
            await self._take(role)

    async def resign(self) -> None:
        """Orders nothing more, and makes room for another leader."""
        self._leadership.resign()
        if self._lease is not None:
            await self._lease.release()

    def check_leads(self) -> None:
        """Raises NotLeader where another gManager is the one to ask."""
        if self._role is Role.FOLLOWER:
            raise NotLeader(f"the gManager at {self._leadership.leader_address} leads")

    def learn_term(self, term: Term) -> None:
        self._leadership.on_term(term)

    @property
    def is_leader(self) -> bool:
        """Whether the map here is that of the cluster."""
        return self._role is Role.LEADER and self.term > 0

    @property
    def writing_term(self) -> Term:
        """In which the map may be written down; 0 where it is not that of the cluster."""
        return self.term if self.is_leader else Term(0)

    @property
    def term(self) -> Term:
        return self._leadership.term(self._keeper.clock())

    @property
    def planning_term(self) -> Term | None:
        return self._leadership.planning_term(self._keeper.clock())

    async def _ask(self, lease: Lease) -> None:
        asked_at_s = self._keeper.clock()
        claim = await lease.claim(self._leadership.highest_term)
        if claim is None:
            self._leadership.on_silence(self._keeper.clock())
        else:
            self._leadership.on_claim(claim, asked_at_s, self._keeper.clock())

    async def _take(self, role: Role) -> None:
        if role is Role.FOLLOWER:
            self._keeper.begin(Cluster())
        elif not self._keeper.instances():
            # Nobody reports here yet. Until this is done a follower goes on naming the last leader.
            self._keeper.begin(await self._load(self._keeper.clock()))
        elif self._role is Role.STAND_IN:
            self._keeper.doubt("instances may have reported to another stand-in")
        self._role = role
        self._metrics.leading.set(role is Role.LEADER)
        detail = {"role": role.value, "term": self.term}
        if role is Role.FOLLOWER:
            detail["leader_address"] = self._leadership.leader_address
        _log.info("the role of this gManager is %s", role.value, extra=detail)
