"""One process of a worker, real but for model, memory, sockets and time: see `network`."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from protos.infinite_llm.v1 import types_pb2, worker_pb2
from services.common.errors import InfiniteLLMError, PartLost, Unavailable
from services.common.ids import Incarnation, InstId, ReqId
from services.worker.distattention.debtor import Peer
from services.worker.distattention.link_terms import LinkBook
from services.worker.engine.attention import ChannelPool
from services.worker.engine.engine import Engine
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import (
    FinishReason,
    Request,
    Schedule,
    ScheduledSequence,
    SequenceOutput,
)
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.lender import Lender
from services.worker.kvcache.lending import LendingLedger
from services.worker.rmanager.creditor_side import CreditorSide
from services.worker.rmanager.link_survey import LinkSurvey
from services.worker.rmanager.mover import Mover
from services.worker.rmanager.pace import Pace
from services.worker.rmanager.peers import Peers, PeerView
from services.worker.rmanager.releaser import Releaser
from services.worker.rmanager.reserver import Reserver
from services.worker.rmanager.retriever import Retriever
from services.worker.rmanager.rmanager import RManager, RManagerParts
from services.worker.rmanager.transfer_parts import TransferParts
from services.worker.server import RManagerServicer
from services.worker.streams import Streams
from tests.unit.worker.protocol.network import GMANAGER, DataLink, Host, Network, Storage, Stub
from tests.unit.worker.protocol.virtual_time import VirtualLoop, pause

BLOCK = 4
NUM_BLOCKS = 8
DIGEST_BYTES = 8
BLOCK_BYTES = BLOCK * DIGEST_BYTES
STEP_S = 0.02
IDLE_S = 0.2
LEASE_S = 2.0


class Clients:
    """In place of gRPC channels."""

    def __init__(self, network: Network, me: Host) -> None:
        self.gmanager = self
        self._open = partial(Stub, network, me)
        self._addresses: dict[tuple[InstId, Incarnation], str] = {}

    async def ask(self, call: Callable[[Stub], Any]) -> Any:
        return await call(self._open(GMANAGER))

    def rmanager(self, peer: PeerView) -> Stub:
        self.remember(peer.inst_id, peer.incarnation, peer.control_address)
        return self.known(peer.inst_id, peer.incarnation)

    def remember(self, inst_id: InstId, incarnation: Incarnation, control_address: str) -> None:
        self._addresses[(inst_id, incarnation)] = control_address

    def known(self, inst_id: InstId, incarnation: Incarnation) -> Stub:
        return self._open(self._addresses[(inst_id, incarnation)])

    async def prune(self, in_use: object) -> None:
        """There is nothing to forget."""

    async def close(self) -> None:
        """There is nothing to close."""


class Runner:
    """The KV of a token is a digest of all tokens up to it; whoever reads another one is caught."""

    def __init__(self, storage: Storage, channels: ChannelPool, violations: list[str]) -> None:
        self._storage = storage
        self._channels = channels
        self._violations = violations

    def run(self, plan: Schedule) -> dict[ReqId, int]:
        for item in plan.items:
            for position in range(item.start, item.end):
                block, offset = divmod(item.sequence.table.slot(position), BLOCK)
                start = offset * DIGEST_BYTES
                digest = _digests(item)[position]
                self._storage.block(block)[start : start + DIGEST_BYTES] = digest
        remote = [self._read_remote(item) for item in plan.items]
        pause(STEP_S)
        for item, blocks in zip(plan.items, remote, strict=True):
            self._check_reads(item, blocks)
        return {item.sequence.req_id: 7 for item in plan.items if item.samples}

    def _read_remote(self, item: ScheduledSequence) -> list[bytes]:
        blocks: list[bytes] = []
        for span in item.sequence.table.context(item.end).remote:
            link: Any = self._channels.get((span.inst_id, span.incarnation))
            blocks += link.attend((span.move_id,))
        return blocks

    def _check_reads(self, item: ScheduledSequence, remote: list[bytes]) -> None:
        context = item.sequence.table.context(item.end)
        local = [bytes(self._storage.block(block)) for block in context.local]
        digests = [
            block[start : start + DIGEST_BYTES]
            for block in (*remote, *local)
            for start in range(0, BLOCK_BYTES, DIGEST_BYTES)
        ]
        if sorted(digests[: item.end]) != sorted(_digests(item)):
            self._violations.append(f"request {item.sequence.req_id} reads what is not its own")


def _unmeasured(peer: Peer) -> NoReturn:
    raise PartLost(peer.inst_id, "how far away it is plays no role here")


def _digests(item: ScheduledSequence) -> list[bytes]:
    """Of all tokens up to the end of the item."""
    digests, last = [], 0
    for token_id in item.sequence.token_ids[: item.end]:
        last = hash((last, token_id)) | 1
        digests.append(last.to_bytes(DIGEST_BYTES, "big", signed=True))
    return digests


class Instance:
    """From its start until it is killed or has left; then another one takes its place."""

    def __init__(
        self, inst_id: int, incarnation: int, network: Network, violations: list[str]
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.is_alive = True
        self.address = f"worker-{inst_id}"
        self.me = Peer(InstId(inst_id), Incarnation(incarnation), f"data-{inst_id}")
        self.storage = Storage(NUM_BLOCKS, BLOCK_BYTES)
        self.pool = BlockPool(NUM_BLOCKS, self.storage.poison)
        ledger = LendingLedger(self.pool, 1, LEASE_S, hold_off_s=0.5)
        self.lender = Lender(self.me.inst_id, ledger, loop.time)
        open_link: Any = partial(DataLink, network, self)
        channels = ChannelPool(open_link)
        self.streams = Streams(loop)
        config = SchedulerConfig(
            BLOCK,
            8,
            4,
            recall_patience_s=0.5,
            stall_timeout_s=3.0,
            lend_retry_s=0.05,
            queue_timeout_s=5.0,
            patience_s=2.0,
        )
        blocks = SequenceBlocks(self.pool, 0.3, is_caching=True)
        self.scheduler = Scheduler(config, blocks)
        self.peers = Peers("m", BLOCK_BYTES, 1)
        runner: Any = Runner(self.storage, channels, violations)
        self.engine = Engine(
            self.scheduler, runner, channels, self.streams,
            lambda: MemoryElsewhere(
                self.peers.free_blocks,
                self.peers.total_blocks,
                self.lender.num_recallable_blocks,
                self.lender.oldest_borrower,
            ),
            loop.time,
        )  # fmt: skip
        clients: Any = Clients(network, self)
        releaser = Releaser(self.me, self.peers, clients, LEASE_S)
        reserver = Reserver(self.me, self.address, self.peers, clients, releaser)
        storage: Any = self.storage
        parts = TransferParts(
            storage, self.engine, channels, self.peers, reserver, open_link, open_link,
            releaser.release, self.streams.trace_of,
        )  # fmt: skip
        self.info = types_pb2.InstanceInfo(
            inst_id=inst_id,
            incarnation=incarnation,
            control_address=self.address,
            data_address=self.me.data_address,
            model="m",
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            block_bytes=BLOCK_BYTES,
        )
        creditor = CreditorSide(self.me, self.pool, self.lender, self.engine, clients)
        links = LinkBook()
        self.rmanager = RManager(
            RManagerParts(
                self.me, self.info, self.pool, self.lender, self.engine, self.peers, clients,
                Mover(parts, Pace.of(2 * BLOCK, BLOCK)), reserver, releaser, creditor,
                Retriever(parts), links, LinkSurvey(self.peers, links, _unmeasured),
                is_pooling=True,
            )
        )  # fmt: skip
        self.streams.start_moves = self.rmanager.start_moves
        self.streams.release = releaser.release
        self.streams.recall = creditor.recaller.recall
        self.services: tuple[object, ...] = (RManagerServicer(self.rmanager),)
        self._violations = violations
        self._managing = asyncio.create_task(self.rmanager.run())
        self._stepping = asyncio.create_task(self._step_loop())
        self._is_stopping = False

    @property
    def is_idle(self) -> bool:
        """Everything is free, here and elsewhere."""
        return (
            self.pool.num_free == NUM_BLOCKS
            and not self.scheduler.running
            and not self.scheduler.waiting
            and not self.scheduler.blocks.remote_spans
        )

    def kill(self) -> None:
        """What it still does reaches nobody any more."""
        self.is_alive = False
        self._managing.cancel()
        self._stepping.cancel()

    async def leave(self) -> None:
        """As a drained process ends."""
        self.rmanager.begin_drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                while self.rmanager.creditor.recall_all() or self.streams.num_open:
                    await asyncio.sleep(0.05)
        self._managing.cancel()
        self._is_stopping = True
        await asyncio.gather(self._managing, self._stepping, return_exceptions=True)
        self.engine._fail_all(Unavailable("the instance is shutting down"))
        await self.rmanager.close()
        self.is_alive = False

    async def generate(self, request: Request) -> int | InfiniteLLMError:
        """How many tokens came, or the error."""
        loop, num_tokens = asyncio.get_running_loop(), 0
        with self.streams.open(request.req_id) as outputs:
            self.engine.call(lambda s: s.add(request, loop.time()))
            while True:
                output = await outputs.get()
                if output.error is not None:
                    return output.error
                num_tokens += len(output.token_ids)
                if output.is_last:
                    return num_tokens

    async def abort(self, req_id: ReqId) -> None:
        """As the service does."""
        now_s = asyncio.get_running_loop().time()
        if await self.engine.ask(lambda s: s.abort(req_id, now_s)):
            ended = SequenceOutput(req_id, finish_reason=FinishReason.ABORT)
            self.streams.on_outputs([ended])

    async def order_move(self, req_id: ReqId, num_blocks: int, dst: "Instance", term: int) -> None:
        """As a plan does."""
        await self.rmanager.move_kvcache(
            worker_pb2.MoveKvCacheRequest(
                req_id=req_id, num_blocks=num_blocks, dst=dst.info, term=term
            )
        )

    async def _step_loop(self) -> None:
        """What the engine's thread does."""
        loop = asyncio.get_running_loop()
        while not self._is_stopping:
            self.engine._empty_inbox(wait_s=0.0)
            self._check()
            is_busy = bool(self.scheduler.running or self.scheduler.waiting)
            if is_busy:
                # A step goes on even if we are killed meanwhile.
                ran = await asyncio.shield(loop.run_in_executor(None, self.engine._step))
            else:
                ran = self.engine._step()
            await asyncio.sleep(STEP_S if ran else IDLE_S)

    def _check(self) -> None:
        """No block is owned twice: what is taken and what is free is never more than there is."""
        local = {block for seq in self.scheduler.running for block in seq.table.local}
        num_known = len(local) + self.lender.num_lent_blocks + self.pool.num_free
        if num_known > NUM_BLOCKS:
            self._violations.append(f"{self.address}: {num_known} of {NUM_BLOCKS} blocks")
        self.pool.check_integrity()
