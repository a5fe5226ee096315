"""Asks owners to take back what lies here: our own requests need the memory, or we are leaving.

Fed by the scheduler's wishes and by the drain. Which grants is the ledger's choice; what is done
about them is the owner's, and its release is all that we wait for.
"""

import asyncio
import logging
from collections.abc import Sequence

import grpc

from protos.infinite_llm.v1 import worker_pb2
from services.common.ids import MoveId
from services.common.rpc import CONTROL_DEADLINE_S
from services.worker.distattention.debtor import Peer
from services.worker.kvcache.lender import Lender
from services.worker.kvcache.lending import Owner
from services.worker.rank import Rank
from services.worker.rmanager.clients import Clients
from services.worker.rmanager.ranks import rank_to_wire

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
"""Between two rounds: an owner gives back within some steps, and a message may have been lost."""


class Recaller:
    """Recalls are idempotent: whoever still wants memory asks again."""

    def __init__(self, me: Peer, lender: Lender, clients: Clients) -> None:
        self._me = me
        self._lender = lender
        self._clients = clients
        self._not_before_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def recall(self, num_blocks: int, claimant: Rank | None) -> None:
        """On the event loop's thread, as often as the wish lasts; a round is made now and then.

        `claimant`: the request that needs the memory; None: we are leaving.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._not_before_s:
            return
        self._not_before_s = now_s + _PERIOD_S
        moves: dict[Owner, list[MoveId]] = {}
        for grant in self._lender.recall(num_blocks, claimant):
            moves.setdefault(grant.owner, []).append(grant.move_id)
        for owner, move_ids in moves.items():
            task = asyncio.create_task(self._ask(owner, move_ids, claimant))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask(self, owner: Owner, move_ids: Sequence[MoveId], claimant: Rank | None) -> None:
        reason = worker_pb2.RECALL_REASON_MEMORY if claimant else worker_pb2.RECALL_REASON_DRAIN
        request = worker_pb2.RecallKvCacheRequest(
            creditor_inst_id=self._me.inst_id,
            creditor_incarnation=self._me.incarnation,
            owner_incarnation=owner.incarnation,
            move_ids=move_ids,
            reason=reason,
            creditor_data_address=self._me.data_address,
            claimant=None if claimant is None else rank_to_wire(claimant),
        )
        stub = self._clients.known(owner.inst_id, owner.incarnation)
        try:
            answer = await stub.RecallKvCache(request, timeout=CONTROL_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            # If it is gone, its leases end.
            logger.warning("instance %d gives nothing back: %s", owner.inst_id, error.code().name)
            return
        if not answer.accepted:
            logger.info("instance %d gives nothing back: %s", owner.inst_id, answer.reason)
