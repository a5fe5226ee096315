"""The planning loop: every period drops silent instances, plans, and issues the moves.

Started and owned by `__main__`. A plan is made on a view that may be stale; the source and the
destination of a move have the last word, and what came of it shows in later heartbeats.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter

from services.common.errors import InfiniteLLMError
from services.common.ids import ReqId, Term
from services.gmanager.cluster import InstanceInfo
from services.gmanager.config import GManagerConfig
from services.gmanager.keeper import MapKeeper
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.policy import Move, Thresholds, plan_moves

#: A request that was told to move is left alone for so long, whatever the answer was: an accepted
#: move needs the time to show in heartbeats, and a refused one would be refused again at once.
COOL_DOWN_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """A planned move with the two instances as the plan saw them."""

    move: Move
    source: InstanceInfo
    destination: InstanceInfo
    #: In which the plan was made; the source refuses it if it has heard of a later one.
    term: Term


@dataclass(frozen=True, slots=True)
class MoveAnswer:
    accepted: bool
    reason: str
    #: The highest that the source has heard of.
    highest_term: Term


#: Tells the source; raises InfiniteLLMError when it does not answer in time.
IssueMove = Callable[[MoveOrder], Awaitable[MoveAnswer]]


class Planner:
    def __init__(
        self,
        config: GManagerConfig,
        keeper: MapKeeper,
        metrics: GManagerMetrics,
        issue_move: IssueMove,
        term: Callable[[], Term | None],
    ) -> None:
        """`term`: in which moves may be ordered now; None while this gManager must not plan."""
        self._config = config
        self._thresholds = Thresholds(config.batch_threshold, config.utilisation_threshold)
        self._keeper = keeper
        self._metrics = metrics
        self._issue_move = issue_move
        self._term = term
        self._busy_until_s: dict[ReqId, float] = {}
        self.moves_issued = 0

    async def run(self) -> None:
        """Plans until cancelled. An unexpected error costs one round, never the planner."""
        while True:
            await asyncio.sleep(self._config.planning_period_s)
            try:
                await self.run_once()
            except Exception:
                _log.exception("planning round failed")

    async def run_once(self) -> None:
        self._keeper.expire(self._config.instance_timeout_s)
        self._metrics.observe(self._keeper.cluster())
        term = self._term()
        if not self._config.pooling or term is None:
            return
        async with asyncio.TaskGroup() as group:
            for order in self._plan(term):
                group.create_task(self._issue(order))

    def _plan(self, term: Term) -> list[MoveOrder]:
        now_s = self._keeper.clock()
        self._busy_until_s = {r: t for r, t in self._busy_until_s.items() if t > now_s}
        cluster = self._keeper.cluster()
        start_s = perf_counter()
        moves = plan_moves(cluster, self._thresholds, self._busy_until_s.keys())
        self._metrics.plan_s.observe(perf_counter() - start_s)
        infos = {instance.inst_id: instance.info for instance in cluster.instances}
        return [
            MoveOrder(move, infos[move.source], infos[move.destination], term) for move in moves
        ]

    async def _issue(self, order: MoveOrder) -> None:
        move = order.move
        self._busy_until_s[move.req_id] = self._keeper.clock() + COOL_DOWN_S
        self.moves_issued += 1
        try:
            answer = await self._issue_move(order)
        except InfiniteLLMError as error:
            outcome, reason = "failed", error.message
        else:
            outcome, reason = "accepted" if answer.accepted else "refused", answer.reason
        self._metrics.moves.labels(outcome).inc()
        _log.info(
            "move %s",
            outcome,
            extra={
                "req_id": move.req_id,
                "num_blocks": move.num_blocks,
                "source": move.source,
                "destination": move.destination,
                "reason": reason,
            },
        )
