"""Finds creditors with room and reserves blocks there. Used by the mover and the retriever."""

import asyncio
import logging

import grpc

from protos.infinite_llm.v1 import gmanager_pb2, worker_pb2
from services.common.ids import ReqId, new_move_id
from services.common.rpc import CONTROL_DEADLINE_S, PROBE_DEADLINE_S
from services.worker.distattention.debtor import Peer
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.rank import Rank
from services.worker.rmanager.clients import Clients, peer_view
from services.worker.rmanager.peers import Peers, PeerView
from services.worker.rmanager.ranks import rank_to_wire
from services.worker.rmanager.releaser import Releaser

logger = logging.getLogger(__name__)


class Reserver:
    """Owner side of `try_move_kvcache` (paper section 6)."""

    def __init__(
        self, me: Peer, control_address: str, peers: Peers, clients: Clients, releaser: Releaser
    ) -> None:
        """`control_address`: where creditors reach us when they want their memory back."""
        self._me = me
        self._control_address = control_address
        self._peers = peers
        self._clients = clients
        self._releaser = releaser
        self.shortest_lease_s = float("inf")
        """Of all that creditors granted: what is lent must be renewed before it ends."""
        self.lease_is_shorter = asyncio.Event()
        """Than it was when this was cleared last."""

    async def find_creditors(self, req_id: ReqId, num_blocks: int) -> list[PeerView]:
        """Urgent: ask the gManager now; when it is away, use the view that it gave last."""
        request = gmanager_pb2.FindCreditorsRequest(
            inst_id=self._me.inst_id, req_id=req_id, num_blocks=num_blocks
        )
        try:
            answer = await self._clients.gmanager.ask(
                lambda gmanager: gmanager.FindCreditors(request, timeout=PROBE_DEADLINE_S)
            )
        except grpc.aio.AioRpcError as error:
            logger.warning("using the last view of creditors: %s", error.code().name)
            return self._peers.best_creditors()
        return self._peers.best_creditors([peer_view(view) for view in answer.creditors])

    async def reserve(
        self, creditor: PeerView, rank: Rank, num_blocks: int, claimant: Rank | None = None
    ) -> RemoteSpan | None:
        """First come, first served; None where it is refused. What is not used must be released.

        `rank`: of the request whose blocks these are; `claimant`: to whom younger ones give way.
        """
        inst_id, incarnation = creditor.inst_id, creditor.incarnation
        span = RemoteSpan(rank.req_id, inst_id, incarnation, new_move_id(), num_blocks)
        request = worker_pb2.TryMoveKvCacheRequest(
            rank=rank_to_wire(rank),
            num_blocks=span.num_blocks,
            source_inst_id=self._me.inst_id,
            source_incarnation=self._me.incarnation,
            move_id=span.move_id,
            dst_incarnation=span.incarnation,
            source_control_address=self._control_address,
            claimant=None if claimant is None else rank_to_wire(claimant),
        )
        stub = self._clients.rmanager(creditor)
        try:
            answer = await stub.TryMoveKvCache(request, timeout=CONTROL_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            logger.warning("instance %d did not answer: %s", creditor.inst_id, error.code().name)
            self._peers.forget(creditor.inst_id)
            # It may have granted before the answer was lost.
            self._releaser.release(span)
            return None
        self._peers.learn_free(creditor.inst_id, answer.free_blocks)
        if answer.granted:
            if answer.lease_s < self.shortest_lease_s:
                self.shortest_lease_s = answer.lease_s
                self.lease_is_shorter.set()
        else:
            logger.info("instance %d refused: %s", creditor.inst_id, answer.reason)
        return span if answer.granted else None
