"""The creditor's side of the rManager: reservations, who gives way to them, their end.

Answers the RManager service and the drain; part of `rmanager`.
"""

import asyncio
import logging
import time

from protos.infinite_llm.v1 import worker_pb2
from services.common.ids import Incarnation, InstId, MoveId
from services.worker.distattention.debtor import Peer
from services.worker.engine.engine import Engine
from services.worker.engine.scheduler import Scheduler
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.lender import Lender
from services.worker.kvcache.lending import Grant, Owner
from services.worker.rmanager.clients import Clients
from services.worker.rmanager.ranks import rank_from_wire
from services.worker.rmanager.recaller import Recaller

logger = logging.getLogger(__name__)


class CreditorSide:
    def __init__(
        self, me: Peer, pool: BlockPool, lender: Lender, engine: Engine, clients: Clients
    ) -> None:
        self.is_lending = True
        """False: nothing new is lent."""
        self.recaller = Recaller(me, lender, clients)
        self._me = me
        self._pool = pool
        self._lender = lender
        self._engine = engine
        self._clients = clients

    def stop_lending(self) -> None:
        """Nothing new, and what is still being filled ends: its owners have all of it."""
        self.is_lending = False
        self._lender.end_unfilled()

    async def close(self) -> None:
        await self.recaller.close()

    async def try_move_kvcache(
        self, request: worker_pb2.TryMoveKvCacheRequest
    ) -> worker_pb2.TryMoveKvCacheResponse:
        """Reserve, first come first served, or refuse; the grant is a lease on our own clock."""
        if not self.is_lending:
            return self._refusal("this instance does not lend")
        if request.dst_incarnation != self._me.incarnation:
            return self._refusal("the reservation is for an earlier start")
        if not request.source_control_address:
            return self._refusal("the source does not say where it could be asked back")
        owner = Owner(InstId(request.source_inst_id), Incarnation(request.source_incarnation))
        grant = self._reserve(owner, request)
        if grant is None and request.HasField("claimant"):
            grant = await self._claim(owner, request)
        if grant is None:
            return self._refusal("no blocks to lend now")
        address = request.source_control_address
        self._clients.remember(owner.inst_id, owner.incarnation, address)
        return worker_pb2.TryMoveKvCacheResponse(
            granted=True, lease_s=self._lender.lease_s, free_blocks=self._pool.num_free
        )

    def _reserve(self, owner: Owner, request: worker_pb2.TryMoveKvCacheRequest) -> Grant | None:
        rank, move_id = rank_from_wire(request.rank), MoveId(request.move_id)
        return self._lender.reserve(owner, rank, move_id, request.num_blocks)

    async def _claim(self, owner: Owner, request: worker_pb2.TryMoveKvCacheRequest) -> Grant | None:
        """Younger requests give way. What is only recalled now is there when it is asked again."""
        claimant = rank_from_wire(request.claimant)
        sacrifice = self._lender.sacrifice_for(claimant, request.num_blocks)
        logger.info("giving way", extra={"to": claimant.req_id} | sacrifice._asdict())
        if sacrifice.num_recalled:
            self.recaller.recall(sacrifice.num_recalled, claimant)

        def give_way(scheduler: Scheduler) -> Grant | None:
            # In one go: a step would take what has just become free.
            scheduler.placement.give_way(claimant, sacrifice.num_free, time.monotonic())
            return self._reserve(owner, request)

        return await self._engine.ask(give_way)

    def _refusal(self, reason: str) -> worker_pb2.TryMoveKvCacheResponse:
        free_blocks = self._pool.num_free
        return worker_pb2.TryMoveKvCacheResponse(reason=reason, free_blocks=free_blocks)

    def renew_leases(
        self, request: worker_pb2.RenewLeasesRequest
    ) -> worker_pb2.RenewLeasesResponse:
        owner = Owner(InstId(request.owner_inst_id), Incarnation(request.owner_incarnation))
        lost = self._lender.renew(owner, [MoveId(move_id) for move_id in request.move_ids])
        return worker_pb2.RenewLeasesResponse(lost_move_ids=lost, incarnation=self._me.incarnation)

    def release_kvcache(
        self, request: worker_pb2.ReleaseKvCacheRequest
    ) -> worker_pb2.ReleaseKvCacheResponse:
        owner = Owner(InstId(request.owner_inst_id), Incarnation(request.owner_incarnation))
        released = self._lender.release(owner, MoveId(request.move_id))
        return worker_pb2.ReleaseKvCacheResponse(
            released_blocks=released, free_blocks=self._pool.num_free
        )

    @property
    def num_lent_blocks(self) -> int:
        return self._lender.num_lent_blocks

    def recall_all(self) -> bool:
        """Whoever has something here should take it away; to be repeated until False: none has."""
        num_blocks = self._lender.num_lent_blocks
        if num_blocks:
            self.recaller.recall(num_blocks, None)
        return num_blocks > 0

    async def expire_loop(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for grant in self._lender.expire():
                logger.warning(
                    "lease over: %d blocks of request %d, owner %d",
                    len(grant.block_ids), grant.req_id, grant.owner.inst_id,
                )  # fmt: skip
