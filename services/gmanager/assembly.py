"""Builds one gManager from its settings: the parts and who is given what. Called by `__main__`."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.common.ids import Term
from services.gmanager.config import GManagerConfig
from services.gmanager.election import Election
from services.gmanager.keeper import MapKeeper
from services.gmanager.leadership import Leadership
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import PlacementMap
from services.gmanager.planner import MoveAnswer, MoveOrder, Planner
from services.gmanager.redis_connection import RedisState, connect
from services.gmanager.redis_lease import RedisLease
from services.gmanager.rmanager_client import issue_move
from services.gmanager.server import GManagerServicer
from services.gmanager.store import Store

#: Heartbeats come at their period; one may just have been missed.
REBUILD_PERIODS = 2


@dataclass(frozen=True, slots=True)
class GManager:
    """What `__main__` starts, serves and stops."""

    keeper: MapKeeper
    store: Store
    election: Election
    planner: Planner
    servicer: GManagerServicer
    disconnect: Callable[[], Awaitable[None]]
    """From Redis, at the very end."""


def build(config: GManagerConfig, metrics: GManagerMetrics) -> GManager:
    """Wires the parts; starts nothing."""
    redis = connect(config.redis_url, config.redis_ca_file, config.redis_password_file)
    placement_map = PlacementMap()
    map_state = RedisState(metrics.redis_up.labels("map"), "the map is kept in memory alone")
    store = Store(redis, placement_map, map_state, lambda: election.writing_term)
    rebuild_s = REBUILD_PERIODS * config.heartbeat_period_s
    keeper = MapKeeper(placement_map, store.record, time.monotonic, rebuild_s)
    if config.leader_lease_s:
        leadership = Leadership(config.leader_lease_s)
        lease_state = RedisState(metrics.redis_up.labels("lease"), "nobody can come to lead")
        address = config.advertise_address or config.listen_address
        lease = RedisLease(redis, address, config.leader_lease_s, lease_state)
    else:
        # Milliseconds since 1970: higher than the terms of all processes before it.
        leadership, lease = Leadership.sole(Term(time.time_ns() // 1_000_000)), None
    election = Election(leadership, keeper, store.load, metrics, lease)

    async def issue(order: MoveOrder) -> MoveAnswer:
        answer = await issue_move(order)
        election.learn_term(answer.highest_term)
        return answer

    planner = Planner(config, keeper, metrics, issue, lambda: election.planning_term)
    servicer = GManagerServicer(config, keeper, metrics, planner.decisions, election)
    return GManager(keeper, store, election, planner, servicer, redis.aclose)
