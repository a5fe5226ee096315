"""The rManager: what of this instance's memory is whose, and what of its requests lies elsewhere.

The debtor's side: moves, renewals, recalls that others make. The creditor's is `creditor_side`. It
answers the RManager service and the scheduler's wishes; `kvcache` keeps the blocks themselves.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial

import grpc

from protos.infinite_llm.v1 import types_pb2, worker_pb2
from services.common.ids import Incarnation, InstId, MoveId, ReqId, Term
from services.common.rpc import PROBE_DEADLINE_S
from services.worker.distattention.debtor import Peer
from services.worker.distattention.link_terms import LinkBook
from services.worker.engine.attention import Creditor
from services.worker.engine.engine import Engine
from services.worker.engine.sequence import MoveOrder
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.lender import Lender
from services.worker.rmanager.clients import Clients, destination_view
from services.worker.rmanager.creditor_side import CreditorSide
from services.worker.rmanager.fence import Fence
from services.worker.rmanager.heartbeat import Heartbeat, Holdings
from services.worker.rmanager.link_survey import LinkSurvey
from services.worker.rmanager.mover import Mover
from services.worker.rmanager.peers import Peers
from services.worker.rmanager.perf_report import PerfReport
from services.worker.rmanager.ranks import rank_from_wire
from services.worker.rmanager.releaser import Releaser
from services.worker.rmanager.reserver import Reserver
from services.worker.rmanager.retriever import Retriever

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RManagerParts:
    """Everything the rManager coordinates; built once by `assembly`."""

    me: Peer
    info: types_pb2.InstanceInfo
    pool: BlockPool
    lender: Lender
    engine: Engine
    peers: Peers
    clients: Clients
    mover: Mover
    reserver: Reserver
    releaser: Releaser
    creditor: CreditorSide
    retriever: Retriever
    links: LinkBook
    survey: LinkSurvey
    is_pooling: bool


class RManager:
    def __init__(self, parts: RManagerParts) -> None:
        self._parts = parts
        self._tasks: set[asyncio.Task[int]] = set()
        self._last_tokens = (0.0, 0)
        self._perf = PerfReport(parts.info.perf, parts.links)
        self.creditor = parts.creditor
        self.is_draining = False
        self._fence = Fence()
        self.heartbeat = Heartbeat(
            parts.info,
            parts.clients,
            self.observe,
            parts.peers.update,
            parts.peers.doubt,
            self._fence,
        )

    @property
    def borrowable_blocks(self) -> int:
        """Blocks that peers could lend at best."""
        return self._parts.peers.total_blocks if self._parts.is_pooling else 0

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Heartbeats, renewals and expiry, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.heartbeat.run())
            tasks.create_task(self._renew_loop())
            tasks.create_task(self.creditor.expire_loop())
            if self._parts.is_pooling:
                tasks.create_task(self._parts.survey.run())

    def begin_drain(self) -> None:
        """Lend nothing new, and let everybody know at once."""
        self.is_draining = True
        self.creditor.stop_lending()
        self.heartbeat.beat_now()

    def end_drain(self) -> None:
        self.is_draining = False
        self.creditor.is_lending = self._parts.is_pooling
        self.heartbeat.beat_now()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.creditor.close()
        await self._parts.retriever.close()
        await self._parts.mover.close()
        await self._parts.releaser.close()
        await self.heartbeat.deregister()
        await self._parts.clients.close()

    # -- debtor side ------------------------------------------------------------------------------

    def start_moves(self, orders: list[MoveOrder]) -> None:
        """Run orders of the scheduler in the background."""
        for order in orders:
            self._start(self._parts.mover.move(order))

    def _start(self, moving: Coroutine[None, None, int]) -> asyncio.Task[int]:
        task = asyncio.create_task(moving)
        self._tasks.add(task)
        task.add_done_callback(self._on_move_done)
        return task

    async def move_kvcache(
        self, request: worker_pb2.MoveKvCacheRequest
    ) -> worker_pb2.MoveKvCacheResponse:
        """The gManager's plan for this source (paper section 6)."""
        is_in_term = self._fence.admits(Term(request.term))
        answer = partial(worker_pb2.MoveKvCacheResponse, highest_term=self._fence.highest_term)
        if not is_in_term:
            return answer(reason="the plan is of a gManager that leads no more")
        if not self._parts.is_pooling or self.is_draining:
            return answer(reason="this instance does not lend")
        if request.source_incarnation not in (0, self._parts.me.incarnation):
            return answer(reason="the plan is for an earlier start")
        if request.dst.inst_id == self._parts.me.inst_id:
            return answer(reason="source and destination are the same")
        # Owned by us, not by the call: an order that was begun must end even if the caller left.
        if not await asyncio.shield(self._start(self._begin_planned(request))):
            return answer(reason="the request has no block that can move")
        return answer(accepted=True)

    async def _begin_planned(self, request: worker_pb2.MoveKvCacheRequest) -> int:
        """Start the move, and return how many blocks it may be about."""
        req_id = ReqId(request.req_id)
        num_movable = await self._parts.engine.ask(lambda s: s.placement.num_movable(req_id))
        num_blocks = min(num_movable, request.num_blocks)
        if num_blocks > 0:
            destination = destination_view(request.dst)
            self._start(self._parts.mover.move_planned(req_id, num_blocks, destination))
        return num_blocks

    async def recall_kvcache(
        self, request: worker_pb2.RecallKvCacheRequest
    ) -> worker_pb2.RecallKvCacheResponse:
        """A creditor wants its memory back."""
        if request.owner_incarnation != self._parts.me.incarnation:
            return worker_pb2.RecallKvCacheResponse(reason="the recall is for an earlier start")
        source = Peer(
            InstId(request.creditor_inst_id),
            Incarnation(request.creditor_incarnation),
            request.creditor_data_address,
        )
        logger.info("recalled", extra={"creditor": source.inst_id, "reason": request.reason})
        # The next view says whether it lends again; until then it does to older requests only.
        self._parts.peers.learn_free(source.inst_id, 0)
        move_ids = [MoveId(move_id) for move_id in request.move_ids]
        claimant = rank_from_wire(request.claimant) if request.HasField("claimant") else None
        if not await self._parts.retriever.retrieve(source, move_ids, claimant):
            return worker_pb2.RecallKvCacheResponse(reason="nothing of these moves is in use here")
        return worker_pb2.RecallKvCacheResponse(accepted=True)

    async def _renew_loop(self) -> None:
        reserver = self._parts.reserver
        while True:
            lease_s = min(self._parts.lender.lease_s, reserver.shortest_lease_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lease_s / 4):
                    await reserver.lease_is_shorter.wait()
            reserver.lease_is_shorter.clear()
            creditors = self._parts.engine.snapshot.creditors
            await asyncio.gather(*(self._renew(c, ids) for c, ids in creditors.items()))
            owners = {(owner.inst_id, owner.incarnation) for owner in self._parts.lender.owners}
            await self._parts.clients.prune(creditors.keys() | owners)

    async def _renew(self, creditor: Creditor, move_ids: frozenset[MoveId]) -> None:
        inst_id, incarnation = creditor
        request = worker_pb2.RenewLeasesRequest(
            owner_inst_id=self._parts.me.inst_id,
            owner_incarnation=self._parts.me.incarnation,
            move_ids=sorted(move_ids),
        )
        stub = self._parts.clients.known(inst_id, incarnation)
        try:
            answer = await stub.RenewLeases(request, timeout=PROBE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            # If it is gone, the next attention call says so within its own deadline.
            logger.warning("instance %d renewed nothing: %s", inst_id, error.code().name)
            return
        lost = frozenset(MoveId(move_id) for move_id in answer.lost_move_ids)
        if answer.incarnation != incarnation:
            lost = move_ids
        if lost:
            self._parts.engine.lose_parts(inst_id, lost)

    def _on_move_done(self, task: asyncio.Task[int]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("move failed", exc_info=task.exception())

    # -- heartbeat --------------------------------------------------------------------------------

    def observe(self) -> tuple[Holdings, types_pb2.InstanceLoad]:
        """What the next heartbeat tells."""
        snapshot, me = self._parts.engine.snapshot, self._parts.me.inst_id
        self._perf.refresh(snapshot)
        holdings: Holdings = self._parts.lender.blocks_by_request()
        holdings |= {(req_id, me): count for req_id, count in snapshot.local_blocks.items()}
        load = types_pb2.InstanceLoad(
            free_blocks=self._parts.pool.num_free,
            lent_blocks=self._parts.lender.num_lent_blocks,
            borrowed_blocks=snapshot.borrowed_blocks,
            running=snapshot.num_running,
            waiting=snapshot.num_waiting,
            waiting_blocks=snapshot.waiting_blocks,
            waiting_sizes=snapshot.waiting_sizes,
            tokens_per_s=self._tokens_per_s(snapshot.generated_tokens),
            running_tokens=snapshot.running_tokens,
            draining=self.is_draining,
        )
        return holdings, load

    def _tokens_per_s(self, generated: int) -> float:
        """Since the last heartbeat."""
        now_s = asyncio.get_running_loop().time()
        (then_s, before), self._last_tokens = self._last_tokens, (now_s, generated)
        return (generated - before) / (now_s - then_s) if then_s else 0.0
