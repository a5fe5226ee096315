"""The planning loop: every period drops silent instances, plans, and issues the moves.

Started and owned by `__main__`. A plan is made on a view that may be stale; the source and the
destination of a move have the last word, and what came of it shows in later heartbeats.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter

from services.common.errors import InfiniteLLMError
from services.common.ids import Term
from services.gmanager.audit import Answer, DecisionLog
from services.gmanager.board import Move, Rules
from services.gmanager.cluster import InstanceInfo, PlacementView, RowKey
from services.gmanager.config import GManagerConfig
from services.gmanager.keeper import MapKeeper
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.policy import Verdict, plan
from services.gmanager.under_way import UnderWay

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
        self._rules = _rules(config)
        self._keeper = keeper
        self._metrics = metrics
        self._issue_move = issue_move
        self._term = term
        self._under_way = UnderWay(config.cool_down_s)
        self._last_round_s = keeper.clock()
        self._issuing: set[asyncio.Task[None]] = set()
        self.decisions = DecisionLog()

    async def run(self) -> None:
        """Plans until cancelled. An unexpected error costs one round, never the planner."""
        try:
            while True:
                await asyncio.sleep(self._config.planning_period_s)
                try:
                    await self.run_once()
                except Exception:
                    _log.exception("planning round failed")
        finally:
            for task in self._issuing:
                task.cancel()

    async def run_once(self) -> None:
        """Plans a round, and begins to order its moves: a source that is gone delays no round."""
        self._drop_silent()
        self._metrics.observe(self._keeper.instances())
        term = self._term()
        if not self._config.pooling or term is None or self._keeper.whole_in_s > 0:
            return
        for order in await self._plan(term):
            task = asyncio.create_task(self._issue(order))
            self._issuing.add(task)
            task.add_done_callback(self._on_issued)

    async def settle(self) -> None:
        """Until every move that was ordered is answered."""
        while self._issuing:
            await asyncio.wait(self._issuing)

    def _drop_silent(self) -> None:
        """Silence tells of an instance only while we could hear it."""
        timeout_s, now_s = self._config.instance_timeout_s, self._keeper.clock()
        if now_s - self._last_round_s > self._config.planning_period_s + timeout_s:
            self._keeper.doubt("this process stood still")
        self._last_round_s = now_s
        self._keeper.expire(timeout_s)

    async def _plan(self, term: Term) -> list[MoveOrder]:
        """On a thread of its own: of many instances it takes longer than heartbeats may wait."""
        start_s, now_s = perf_counter(), self._keeper.clock()
        view = self._keeper.snapshot()
        self._under_way.refresh(partial(_held_blocks, view), now_s)
        decisions = await asyncio.to_thread(
            plan, view, self._rules, self._under_way.moves, self._under_way.resting
        )
        self._metrics.plan_s.observe(perf_counter() - start_s)
        for decision in decisions:
            self.decisions.note(decision, now_s)
        moves = [m for d in decisions if d.verdict is Verdict.MOVE for m in d.moves]
        for move in moves:
            key = RowKey(move.req_id, move.destination)
            self._under_way.add(move, _held_blocks(view, key), now_s)
        infos = {instance.inst_id: instance.info for instance in view.instances}
        return [
            MoveOrder(move, infos[move.source], infos[move.destination], term) for move in moves
        ]

    async def _issue(self, order: MoveOrder) -> None:
        answer = Answer("dry run", "")
        if not self._config.planner_dry_run:
            self.decisions.moves_issued += 1
            answer = await self._ask_source(order)
        if answer.outcome != "accepted":
            self._under_way.end(order.move)
        self.decisions.note_answer(order.move, answer)
        self._metrics.moves.labels(answer.outcome).inc()
        _log.info("move %s", answer.outcome, extra={**asdict(order.move), "reason": answer.reason})

    def _on_issued(self, task: asyncio.Task[None]) -> None:
        self._issuing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("order failed", exc_info=task.exception())

    async def _ask_source(self, order: MoveOrder) -> Answer:
        try:
            answer = await self._issue_move(order)
        except InfiniteLLMError as error:
            return Answer("failed", error.message)
        return Answer("accepted" if answer.accepted else "refused", answer.reason)


def _held_blocks(view: PlacementView, key: RowKey) -> int:
    row = view.rows.get(key.inst_id, {}).get(key.req_id)
    return row.num_blocks if row else 0


def _rules(config: GManagerConfig) -> Rules:
    return Rules(
        batch_threshold=config.batch_threshold,
        utilisation_threshold=config.utilisation_threshold,
        min_gain=config.min_gain,
        max_moves_per_source=config.max_moves_per_source,
        max_moves_per_destination=config.max_moves_per_destination,
        other_node_round_trip_s=config.other_node_round_trip_s,
        other_node_bytes_per_s=config.other_node_bytes_per_s,
    )
