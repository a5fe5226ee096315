"""Instances without a model: real pools, sockets, gRPC and engine threads; the runner pretends.

A pretended step writes each token id into its slot, so that a copied block can be recognised.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

import grpc
import torch
from prometheus_client import CollectorRegistry

from kernels.reference import ReferenceKernels
from protos.infinite_llm.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from services.common.ids import InstId, ReqId, new_incarnation
from services.common.rpc import new_server
from services.worker.distattention.creditor import CreditorServer, Serving
from services.worker.distattention.debtor import CreditorChannel, Peer
from services.worker.distattention.link import Borrowing
from services.worker.distattention.link_terms import LinkBook, measure
from services.worker.distattention.memory import geometry_of
from services.worker.distattention.metrics import DataPlaneMetrics
from services.worker.distattention.transfer import BlockFetcher, BlockSender
from services.worker.distattention.transport.opening import Transport
from services.worker.drain import Drain
from services.worker.engine.attention import ChannelPool
from services.worker.engine.engine import Engine
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import Request, Schedule
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.grammar_loader import GrammarLoader
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.lender import Lender
from services.worker.kvcache.lending import LendingLedger
from services.worker.kvcache.storage import KvShape, KvStorage
from services.worker.request_checks import Limits, RequestChecks
from services.worker.rmanager.clients import Clients
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
from services.worker.server import RManagerServicer, WorkerServicer
from services.worker.streams import Streams
from tests.unit.grammars import compiler

BLOCK = 4
SHAPE = KvShape(num_layers=1, num_kv_heads=1, block_size=BLOCK, head_dim=8, dtype=torch.float32)
DEADLINE_S = 2.0
#: Any move in one piece.
NO_PACE = Pace.of(1000 * BLOCK, BLOCK)


class PretendRunner:
    """Stores each token in its slot and samples 7."""

    def __init__(self, storage: KvStorage) -> None:
        self._storage = storage
        self.error: Exception | None = None
        self.step_s = 0.01
        """A step takes time, or a test would drown in them."""

    def run(self, plan: Schedule) -> dict[ReqId, int]:
        if self.error is not None:
            raise self.error
        time.sleep(self.step_s)
        for item in plan.items:
            seq = item.sequence
            for position in range(item.start, item.end):
                block, offset = divmod(seq.table.slot(position), BLOCK)
                self._storage.pool[block, :, :, :, offset] = float(seq.token_ids[position])
        return {item.sequence.req_id: 7 for item in plan.items if item.samples}


class Instance:
    """One worker's parts around a pretended model."""

    def __init__(
        self,
        inst_id: int,
        folder: Path,
        num_blocks: int,
        lease_s: float,
        gmanager_address: str = "127.0.0.1:1",
        perf: types_pb2.PerfConstants | None = None,
        pace: Pace = NO_PACE,
    ) -> None:
        """By default there is no gManager: the last view is all there is."""
        incarnation = new_incarnation()
        self.server = new_server()
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.pool = BlockPool(num_blocks)
        self.storage = KvStorage(num_blocks, SHAPE)
        self.runner = PretendRunner(self.storage)
        ledger = LendingLedger(self.pool, 1, lease_s, hold_off_s=0.5)
        self.lender = Lender(InstId(inst_id), ledger, time.monotonic)
        geometry = geometry_of(self.storage.pool, 1)
        metrics = DataPlaneMetrics(CollectorRegistry())
        self.me = Peer(InstId(inst_id), incarnation, f"unix:{folder}/{inst_id}.sock")
        serving = Serving(
            self.me, geometry, self.lender, self.storage.pool, ReferenceKernels(), metrics.creditor,
        )  # fmt: skip
        self.creditor = CreditorServer(self.me.data_address, serving, Transport())
        self.links = LinkBook()
        borrowing = Borrowing(
            self.me, geometry, Transport(), DEADLINE_S, on_blocks=self.links.record_blocks
        )
        channels = ChannelPool(lambda p: CreditorChannel(borrowing, p, 16))
        self.streams = Streams(asyncio.get_running_loop())
        config = SchedulerConfig(BLOCK, 16, 8, recall_patience_s=0.5, lend_retry_s=0.05)
        scheduler = Scheduler(config, SequenceBlocks(self.pool, 0.0, is_caching=True))
        self.peers = Peers("m", SHAPE.block_bytes, 1)
        self.engine = Engine(
            scheduler,
            self.runner,  # type: ignore[arg-type]
            channels,
            self.streams,
            lambda: MemoryElsewhere(
                self.peers.free_blocks,
                self.peers.total_blocks,
                self.lender.num_recallable_blocks,
                self.lender.oldest_borrower,
            ),
        )
        self.clients = Clients([gmanager_address])
        self.releaser = Releaser(self.me, self.peers, self.clients, lease_s)
        reserver = Reserver(
            self.me, f"127.0.0.1:{self.port}", self.peers, self.clients, self.releaser
        )
        parts = TransferParts(
            self.storage, self.engine, channels, self.peers, reserver,
            lambda p: BlockSender(borrowing, p),
            lambda p: BlockFetcher(borrowing, p),
            self.releaser.release, self.streams.trace_of,
        )  # fmt: skip
        self.info = self._info(perf)
        self.mover, self.retriever = Mover(parts, pace), Retriever(parts)
        creditor = CreditorSide(self.me, self.pool, self.lender, self.engine, self.clients)
        self.recaller = creditor.recaller
        self.rmanager = RManager(
            RManagerParts(
                self.me, self.info, self.pool, self.lender, self.engine, self.peers,
                self.clients, self.mover, reserver, self.releaser,
                creditor, self.retriever, self.links,
                LinkSurvey(self.peers, self.links, partial(measure, borrowing)), is_pooling=True,
            )
        )  # fmt: skip
        self.streams.start_moves = self.rmanager.start_moves
        self.streams.release = self.releaser.release
        self.streams.recall = self.recaller.recall
        self.stop = asyncio.Event()
        self.readiness: list[bool] = []
        drain = Drain(self.rmanager, self.streams, self.stop, 5.0, self.be_ready)
        limits = Limits(1000, 4096, BLOCK, num_blocks, frozenset({2}))
        grammars = GrammarLoader(compiler, limits.eos_token_ids)
        checks = RequestChecks(limits, lambda: self.rmanager.borrowable_blocks, grammars)
        self.worker = WorkerServicer(self.engine, self.streams, checks, self.rmanager, drain)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.worker, self.server)
        servicer = RManagerServicer(self.rmanager)
        worker_pb2_grpc.add_RManagerServicer_to_server(servicer, self.server)

    @property
    def view(self) -> PeerView:
        """How others see this instance."""
        return PeerView(
            self.me.inst_id, self.me.incarnation, f"127.0.0.1:{self.port}", self.me.data_address,
            BLOCK, SHAPE.block_bytes, "m", self.pool.num_blocks, self.pool.num_free,
        )  # fmt: skip

    def _info(self, perf: types_pb2.PerfConstants | None) -> types_pb2.InstanceInfo:
        return types_pb2.InstanceInfo(
            inst_id=self.me.inst_id,
            incarnation=self.me.incarnation,
            control_address=f"127.0.0.1:{self.port}",
            data_address=self.me.data_address,
            model="m",
            block_size=BLOCK,
            num_blocks=self.pool.num_blocks,
            block_bytes=SHAPE.block_bytes,
            perf=perf,
        )

    def meet(self, *others: "Instance") -> None:
        """Learn of others, as a heartbeat's answer would tell."""
        self.peers.update([other.view for other in others])

    async def be_ready(self, is_ready: bool) -> None:
        self.readiness.append(is_ready)

    async def __aenter__(self) -> Self:
        self.creditor.start()
        self.engine.start()
        await self.server.start()
        self._run = asyncio.create_task(self.rmanager.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._run.cancel()
        await asyncio.gather(self._run, return_exceptions=True)
        await asyncio.to_thread(self.engine.stop)
        await self.rmanager.close()
        await self.server.stop(None)
        await asyncio.to_thread(self.creditor.stop)

    def stub(self) -> tuple[grpc.aio.Channel, "worker_pb2_grpc.WorkerAsyncStub"]:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        return channel, worker_pb2_grpc.WorkerStub(channel)

    async def on_engine(self, function: Callable[[Scheduler], object]) -> object:
        return await self.engine.ask(function)

    async def submit(self, req_id: int, num_prompt: int, max_tokens: int) -> None:
        prompt = tuple(100 + position for position in range(num_prompt))
        request = Request(ReqId(req_id), prompt, max_tokens)
        await self.on_engine(lambda s: s.add(request, time.monotonic()))

    async def generate(
        self, num_prompt: int, max_tokens: int, req_id: int = 1, arrived_at_s: float = 0.0
    ) -> list[int]:
        """Through gRPC, as the router does."""
        channel, stub = self.stub()
        request = worker_pb2.GenerateTokensRequest(
            req_id=req_id,
            prompt_token_ids=range(100, 100 + num_prompt),
            max_tokens=max_tokens,
            arrived_at_s=arrived_at_s,
        )
        async with channel:
            answers = stub.Generate(request, timeout=20)
            return [token async for answer in answers for token in answer.token_ids]


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for what other threads bring about; bounded, and instant once it is so."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise AssertionError("it did not happen in time")
        await asyncio.sleep(0.005)
