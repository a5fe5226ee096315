"""Three workers and a gManager on one network, and what hypothesis does to them."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from prometheus_client import CollectorRegistry

from services.common.errors import InfiniteLLMError
from services.common.ids import InstId, ReqId, Term
from services.gmanager.audit import DecisionLog
from services.gmanager.cluster import Cluster
from services.gmanager.config import GManagerConfig
from services.gmanager.election import Election
from services.gmanager.keeper import MapKeeper
from services.gmanager.leadership import Leadership
from services.gmanager.metrics import GManagerMetrics
from services.gmanager.placement_map import PlacementMap
from services.gmanager.server import GManagerServicer
from services.worker.engine.sequence import Request
from tests.unit.worker.protocol.instance import Instance
from tests.unit.worker.protocol.network import GMANAGER, Fate, Network

NUM_INSTANCES = 3
#: Leases, deadlines and time-outs together take less; what is not free then never will be.
QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class Submit:
    inst: int
    num_prompt: int
    max_tokens: int
    prefix: int = 0
    """Requests with the same one begin alike."""


@dataclass(frozen=True, slots=True)
class Abort:
    number: int


@dataclass(frozen=True, slots=True)
class Order:
    """A plan of the leader, or of one deposed."""

    number: int
    num_blocks: int
    dst: int
    is_deposed: bool = False


@dataclass(frozen=True, slots=True)
class Recall:
    inst: int


@dataclass(frozen=True, slots=True)
class Kill:
    inst: int
    away_s: float


@dataclass(frozen=True, slots=True)
class Leave:
    inst: int


@dataclass(frozen=True, slots=True)
class KillGManager:
    away_s: float


Event = Submit | Abort | Order | Recall | Kill | Leave | KillGManager


@dataclass(frozen=True, slots=True)
class Life:
    """Everything that happens: first requests, then events with the pauses before them, and the
    fates of messages between instances, of what they read and copy, and of those to the gManager.
    """

    first: Sequence[Submit]
    events: Sequence[tuple[float, Event]]
    control: Sequence[Fate] = ()
    data: Sequence[Fate] = ()
    gmanager: Sequence[Fate] = ()


class GManagerHost:
    """The real service and its map, without a plan of its own: orders come as events."""

    def __init__(self, term: int) -> None:
        loop, config = asyncio.get_running_loop(), GManagerConfig(heartbeat_period_s=0.3)
        self.is_alive = True
        self.term = term
        self.keeper = MapKeeper(PlacementMap(), lambda _: None, loop.time)
        metrics = GManagerMetrics(CollectorRegistry())
        election = Election(Leadership.sole(Term(term)), self.keeper, _nothing, metrics, None)
        self._begun = asyncio.create_task(election.step())
        servicer = GManagerServicer(config, self.keeper, metrics, DecisionLog(), election)
        self.services: tuple[object, ...] = (servicer,)
        self._config = config

    def expire(self) -> None:
        self.keeper.expire(self._config.instance_timeout_s)


async def _nothing(_: float) -> Cluster:
    return Cluster()


@dataclass
class World:
    life: Life
    violations: list[str] = field(default_factory=list)
    answers: dict[int, asyncio.Task[int | InfiniteLLMError]] = field(default_factory=dict)

    async def run(self) -> None:
        self._incarnations = count(1)
        self._owners: dict[int, Instance] = {}
        self._requests: dict[int, Request] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._changes: list[asyncio.Task[None]] = []
        """Of processes: these end."""
        self.network = Network()
        self._start_gmanager(1)
        self.instances = [self._start(inst) for inst in range(NUM_INSTANCES)]
        await asyncio.sleep(1.0)
        self.network.trouble(self.life.control, self.life.data, self.life.gmanager)
        for submit in self.life.first:
            self._submit(submit)
        for pause_s, event in self.life.events:
            await asyncio.sleep(pause_s)
            self._happen(event)
        await asyncio.sleep(1.0)
        self.network.heal()
        await asyncio.gather(*self._changes)
        await self._become_quiet()

    # -- events -----------------------------------------------------------------------------------

    def _happen(self, event: Event) -> None:
        match event:
            case Submit():
                self._submit(event)
            case Abort():
                owner = self._owners.get(event.number)
                if owner is not None and owner.is_alive:
                    self._spawn(owner.abort(ReqId(event.number)))
            case Order():
                self._order(event)
            case Recall():
                self.instances[event.inst].rmanager.creditor.recall_all()
            case Kill():
                self._change(self._kill(event.inst, event.away_s))
            case Leave():
                self._change(self._leave(event.inst))
            case KillGManager():
                self._change(self._kill_gmanager(event.away_s))

    def _submit(self, event: Submit) -> None:
        number = len(self._requests)
        tokens = random.Random(event.prefix)
        prompt = tuple(tokens.randrange(100) for _ in range(event.num_prompt))
        now_s = asyncio.get_running_loop().time()
        request = Request(ReqId(number), prompt, event.max_tokens, arrived_at_s=now_s)
        owner = self._owners[number] = self.instances[event.inst]
        self._requests[number] = request
        self.answers[number] = asyncio.create_task(owner.generate(request))

    def _order(self, event: Order) -> None:
        owner = self._owners.get(event.number)
        if owner is None or not owner.is_alive:
            return
        term = self.gmanager.term - event.is_deposed
        dst = self.instances[event.dst]
        self._spawn(owner.order_move(ReqId(event.number), event.num_blocks, dst, term))

    async def _kill(self, inst: int, away_s: float) -> None:
        self.instances[inst].kill()
        await asyncio.sleep(away_s)
        self._replace(inst)

    async def _leave(self, inst: int) -> None:
        leaving = self.instances[inst]
        if leaving.rmanager.is_draining or not leaving.is_alive:
            return
        await leaving.leave()
        self._replace(inst)

    async def _kill_gmanager(self, away_s: float) -> None:
        self.gmanager.is_alive = False
        await asyncio.sleep(away_s)
        if not self.gmanager.is_alive:
            self._start_gmanager(self.gmanager.term + 1)

    def _change(self, change: Coroutine[Any, Any, None]) -> None:
        self._changes.append(self._spawn(change))

    def _spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Whoever is asked may die before it answers."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        return task

    # -- processes --------------------------------------------------------------------------------

    def _start(self, inst: int) -> Instance:
        instance = Instance(inst, next(self._incarnations), self.network, self.violations)
        self.network.hosts[instance.address] = instance
        self.network.data_hosts[InstId(inst)] = instance
        return instance

    def _replace(self, inst: int) -> None:
        if not self.instances[inst].is_alive:
            self.instances[inst] = self._start(inst)

    def _start_gmanager(self, term: int) -> None:
        self.gmanager = self.network.hosts[GMANAGER] = GManagerHost(term)

    # -- the end ----------------------------------------------------------------------------------

    async def _become_quiet(self) -> None:
        end_s = asyncio.get_running_loop().time() + QUIET_S
        while (
            (trouble := self._trouble())
            and not self.violations
            and asyncio.get_running_loop().time() < end_s
        ):
            await asyncio.sleep(1.0)
            self.gmanager.expire()
        self.violations += trouble
        for number, answer in self.answers.items():
            if answer.done() and answer.exception() is not None:
                self.violations.append(f"request {number}: {answer.exception()!r}")

    def _trouble(self) -> list[str]:
        """What is not as it should be in the end."""
        trouble = [
            f"{instance.address}: {instance.pool.num_free} blocks are free"
            for instance in self.instances
            if not instance.is_idle
        ]
        if rows := self.gmanager.keeper.cluster().entries:
            trouble.append(f"the map still has {rows}")
        for number, answer in self.answers.items():
            if self._owners[number].is_alive and not answer.done():
                trouble.append(f"request {number} never ends")
        return trouble
