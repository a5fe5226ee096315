"""Builds one worker from its settings: the parts and who is given what. Called by `__main__`."""

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from prometheus_client import REGISTRY

from protos.infinite_llm.v1 import types_pb2
from services.common.addresses import split_addresses
from services.common.errors import ConfigError
from services.common.grammars import GrammarCompiler
from services.common.health import HealthReporter
from services.common.ids import InstId, new_incarnation
from services.worker.config import Config
from services.worker.core import Core, build_core, build_runner, build_scheduler
from services.worker.distattention.creditor import CreditorServer, Serving
from services.worker.distattention.debtor import CreditorChannel, Peer
from services.worker.distattention.link import Borrowing
from services.worker.distattention.link_terms import LinkBook, measure
from services.worker.distattention.memory import geometry_of, tensor_bytes
from services.worker.distattention.metrics import DataPlaneMetrics
from services.worker.distattention.transfer import BlockFetcher, BlockSender
from services.worker.distattention.transport.one_sided_pool import OneSidedPool
from services.worker.distattention.transport.opening import Transport
from services.worker.distattention.transport.tls import TlsFiles
from services.worker.drain import Drain
from services.worker.engine.attention import ChannelPool
from services.worker.engine.engine import Engine
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.grammar_loader import GrammarLoader
from services.worker.kvcache.lender import Lender
from services.worker.kvcache.lending import LendingLedger
from services.worker.metrics import WorkerCollector
from services.worker.models.config import ModelConfig
from services.worker.profiling import LinkParts, measure_compute
from services.worker.request_checks import Limits, RequestChecks
from services.worker.rmanager.clients import Clients
from services.worker.rmanager.creditor_side import CreditorSide
from services.worker.rmanager.link_survey import LinkSurvey
from services.worker.rmanager.mover import Mover
from services.worker.rmanager.pace import Pace
from services.worker.rmanager.peers import Peers
from services.worker.rmanager.releaser import Releaser
from services.worker.rmanager.reserver import Reserver
from services.worker.rmanager.retriever import Retriever
from services.worker.rmanager.rmanager import RManager, RManagerParts
from services.worker.rmanager.transfer_parts import TransferParts
from services.worker.streams import Streams


@dataclass(frozen=True, slots=True)
class Prepared:
    """What takes long to make: the model in memory, and what it was measured to do."""

    core: Core
    perf: types_pb2.PerfConstants
    folder: Path
    """Of the model."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What `__main__` starts, serves and stops."""

    engine: Engine
    streams: Streams
    creditor: CreditorServer
    rmanager: RManager
    drain: Drain
    checks: RequestChecks
    info: types_pb2.InstanceInfo
    link: LinkParts


def prepare(config: Config, folder: Path) -> Prepared:
    """Blocks for seconds: off the event loop."""
    core = build_core(config, folder)
    return Prepared(core, measure_compute(core.model, core.kernels, core.storage), folder)


def build(
    config: Config, prepared: Prepared, stop: asyncio.Event, health: HealthReporter
) -> Worker:
    """Wires the parts, on the event loop; starts nothing. `stop` is set by a drain."""
    core = prepared.core
    plane = _data_plane(config, core)
    peers = Peers(_model_name(config), core.storage.shape.block_bytes, config.lend_keep_free)
    clients = Clients(split_addresses(config.gmanager_address))
    me, storage, lender = plane.link.me, core.storage, plane.link.lender
    channels, streams = ChannelPool(plane.open_channel), Streams(asyncio.get_running_loop())
    engine = Engine(
        build_scheduler(config, core),
        build_runner(config, core, channels),
        channels,
        streams,
        _memory_elsewhere(config, peers, lender),
    )
    releaser = Releaser(me, peers, clients, config.lease_s)
    info = _instance_info(config, core, me, prepared.perf)
    reserver = Reserver(me, info.control_address, peers, clients, releaser)
    parts = TransferParts(storage, engine, channels, peers, reserver, plane.open_sender,
                          plane.open_fetcher, releaser.release, streams.trace_of)  # fmt: skip
    survey = LinkSurvey(peers, plane.links, partial(measure, plane.link.borrowing))
    mover = Mover(parts, Pace.of(config.move_tokens_per_step, config.block_size))
    retriever = Retriever(parts)
    creditor = CreditorSide(me, core.pool, lender, engine, clients)
    creditor.is_lending = config.pooling
    rmanager = RManager(
        RManagerParts(me, info, core.pool, lender, engine, peers, clients, mover, reserver,
                      releaser, creditor, retriever, plane.links, survey, config.pooling)
    )  # fmt: skip
    streams.start_moves, streams.release = rmanager.start_moves, releaser.release
    streams.recall = creditor.recaller.recall
    REGISTRY.register(WorkerCollector(engine, core.pool, lender, mover, retriever))
    checks = _checks(config, prepared, rmanager)
    drain = Drain(rmanager, streams, stop, config.drain_timeout_s, health.be_ready)
    return Worker(engine, streams, plane.creditor, rmanager, drain, checks, info, plane.link)


def _memory_elsewhere(
    config: Config, peers: Peers, lender: Lender
) -> Callable[[], MemoryElsewhere]:
    if not config.pooling:
        return MemoryElsewhere
    return lambda: MemoryElsewhere(
        peers.free_blocks, peers.total_blocks, lender.num_recallable_blocks, lender.oldest_borrower
    )


@dataclass(frozen=True, slots=True)
class _DataPlane:
    """Both sides of lending: what we serve to others, and how we reach them."""

    creditor: CreditorServer
    link: LinkParts
    links: LinkBook
    open_channel: Callable[[Peer], CreditorChannel]
    open_sender: Callable[[Peer], BlockSender]
    open_fetcher: Callable[[Peer], BlockFetcher]


def _data_plane(config: Config, core: Core) -> _DataPlane:
    geometry = geometry_of(core.storage.pool, core.model.config.num_heads)
    metrics = DataPlaneMetrics(REGISTRY)
    ledger = LendingLedger(
        core.pool,
        config.lend_keep_free,
        config.lease_s,
        config.max_lent_blocks,
        config.lend_hold_off_s,
    )
    lender = Lender(InstId(config.inst_id), ledger, time.monotonic)
    me = Peer(InstId(config.inst_id), new_incarnation(), config.advertise_data_address)
    serving = Serving(me, geometry, lender, core.storage.pool, core.kernels, metrics.creditor)
    transport = _transport(config, core.storage.pool)
    try:
        creditor = CreditorServer(config.data_address, serving, transport)
    except ConfigError as error:
        raise ConfigError(f"INFINITE_LLM_DATA_ADDRESS: {error.message}") from error
    if not me.data_address:
        me = replace(me, data_address=creditor.address)

    deadline_s = config.attention_deadline_s
    links = LinkBook()
    borrowing = Borrowing(me, geometry, transport, deadline_s, metrics.debtor, links.record_blocks)
    return _DataPlane(
        creditor,
        LinkParts(core.storage, lender, replace(borrowing, metrics=None)),
        links,
        lambda peer: CreditorChannel(borrowing, peer, config.max_batched_tokens),
        partial(BlockSender, borrowing),
        partial(BlockFetcher, borrowing),
    )


def _transport(config: Config, kv_pool: torch.Tensor) -> Transport:
    if not config.data_tls_certificate:
        is_one_sided = config.data_address.startswith("nixl:")
        return Transport(pool=OneSidedPool(tensor_bytes(kv_pool)) if is_one_sided else None)
    paths = (config.data_tls_certificate, config.data_tls_key, config.data_tls_ca)
    tls = TlsFiles(*map(Path, paths))
    try:
        tls.check()
    except ConfigError as error:
        raise ConfigError(f"INFINITE_LLM_DATA_TLS_*: {error.message}") from error
    return Transport(tls)


def _instance_info(
    config: Config, core: Core, me: Peer, perf: types_pb2.PerfConstants
) -> types_pb2.InstanceInfo:
    shape = core.storage.shape
    return types_pb2.InstanceInfo(
        inst_id=me.inst_id,
        incarnation=me.incarnation,
        control_address=config.advertise_address or config.listen_address,
        data_address=me.data_address,
        model=_model_name(config),
        block_size=shape.block_size,
        num_blocks=config.num_blocks,
        block_bytes=shape.block_bytes,
        max_model_len=core.model.config.max_model_len,
        perf=perf,
        node=config.node or socket.gethostname(),
        max_lent_blocks=config.max_lent_blocks,
    )


def _model_name(config: Config) -> str:
    return config.model_name or Path(config.model).name


def _checks(config: Config, prepared: Prepared, rmanager: RManager) -> RequestChecks:
    model = prepared.core.model.config
    eos_token_ids = frozenset(model.eos_token_ids)
    load = partial(GrammarCompiler.load, prepared.folder, model.vocab_size, model.eos_token_ids)
    grammars = GrammarLoader(load, eos_token_ids)
    return RequestChecks(_limits(config, model), lambda: rmanager.borrowable_blocks, grammars)


def _limits(config: Config, model: ModelConfig) -> Limits:
    return Limits(
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        eos_token_ids=frozenset(model.eos_token_ids),
    )
