"""Builds one worker from its settings: the parts and who is given what. Called by `__main__`."""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import REGISTRY

from protos.infinite_llm.v1 import types_pb2
from services.common.ids import InstId, new_incarnation
from services.worker.config import Config
from services.worker.core import build_core, build_runner, build_scheduler
from services.worker.distattention.creditor import CreditorServer, Serving
from services.worker.distattention.debtor import CreditorChannel, Peer
from services.worker.distattention.memory import geometry_of
from services.worker.distattention.metrics import DataPlaneMetrics
from services.worker.distattention.transfer import BlockSender
from services.worker.engine.attention import ChannelPool
from services.worker.engine.engine import Engine
from services.worker.kvcache.lender import Lender
from services.worker.kvcache.lending import LendingLedger
from services.worker.kvcache.storage import KvShape
from services.worker.metrics import WorkerCollector
from services.worker.models.llama import LlamaFamilyModel
from services.worker.profiling import Profiled, measure
from services.worker.rmanager.clients import Clients
from services.worker.rmanager.mover import Mover, MoverParts
from services.worker.rmanager.peers import Peers
from services.worker.rmanager.releaser import Releaser
from services.worker.rmanager.rmanager import RManager, RManagerParts
from services.worker.server import Limits
from services.worker.streams import Streams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    """What `__main__` starts, serves and stops."""

    engine: Engine
    streams: Streams
    creditor: CreditorServer
    rmanager: RManager
    limits: Limits


def build(config: Config, folder: Path, loop: asyncio.AbstractEventLoop) -> Worker:
    """Everything until the instance may register. Blocks for the model's loading."""
    core = build_core(config, folder)
    model, storage, pool = core.model, core.storage, core.pool
    geometry = geometry_of(storage.pool, model.config.num_heads)
    metrics = DataPlaneMetrics(REGISTRY)

    ledger = LendingLedger(pool, config.lend_keep_free, config.lease_s)
    lender = Lender(InstId(config.inst_id), ledger, time.monotonic)
    incarnation = new_incarnation()
    serving_me = Peer(InstId(config.inst_id), incarnation, config.data_address)
    creditor = CreditorServer(
        config.data_address,
        Serving(serving_me, geometry, lender, storage.pool, core.kernels,
                config.max_batched_tokens, metrics.creditor),
    )  # fmt: skip
    me = Peer(serving_me.inst_id, incarnation, creditor.address)

    def open_channel(peer: Peer) -> CreditorChannel:
        rows, deadline_s = config.max_batched_tokens, config.attention_deadline_s
        return CreditorChannel(me, peer, geometry, rows, deadline_s, metrics.debtor)

    def open_sender(peer: Peer) -> BlockSender:
        return BlockSender(me, peer, geometry, config.attention_deadline_s, metrics.debtor)

    channels = ChannelPool(open_channel)
    streams = Streams(loop)
    scheduler, runner = build_scheduler(config, core), build_runner(config, core, channels)
    peers = Peers(_model_name(config), storage.shape.block_bytes, config.lend_keep_free)
    engine = Engine(
        scheduler,
        runner,
        channels,
        streams,
        lambda: peers.free_blocks if config.pooling else 0,
    )
    creditor.start()
    perf = measure(Profiled(model, core.kernels, storage, lender, me, geometry))
    info = _instance_info(config, model, me, storage.shape, perf)
    clients = Clients(config.gmanager_address)
    releaser = Releaser(me, peers, clients, config.lease_s)
    mover = Mover(
        MoverParts(me, storage, engine, channels, peers, clients, open_sender,
                   releaser.release, streams.trace_of)
    )  # fmt: skip
    rmanager = RManager(
        RManagerParts(me, info, pool, lender, engine, peers, clients, mover, releaser,
                      config.pooling)
    )  # fmt: skip
    streams.start_moves, streams.release = rmanager.start_moves, releaser.release
    REGISTRY.register(WorkerCollector(engine, pool, lender, mover))
    return Worker(engine, streams, creditor, rmanager, _limits(config, model))


def _instance_info(
    config: Config,
    model: LlamaFamilyModel,
    me: Peer,
    shape: KvShape,
    perf: types_pb2.PerfConstants,
) -> types_pb2.InstanceInfo:
    return types_pb2.InstanceInfo(
        inst_id=me.inst_id,
        incarnation=me.incarnation,
        control_address=config.advertise_address or config.listen_address,
        data_address=me.data_address,
        model=_model_name(config),
        block_size=shape.block_size,
        num_blocks=config.num_blocks,
        block_bytes=shape.block_bytes,
        max_model_len=model.config.max_model_len,
        perf=perf,
    )


def _model_name(config: Config) -> str:
    return config.model_name or Path(config.model).name


def _limits(config: Config, model: LlamaFamilyModel) -> Limits:
    return Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_model_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        eos_token_ids=frozenset(model.config.eos_token_ids),
    )
