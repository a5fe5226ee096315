"""Measures the constants of the performance model once, at start (paper section 5.1).

W(beta)/f(beta): a step of the non-attention layers by batch size. 1/g: attention per cached token.
The link: this instance's own data plane, through a real socket. Called before the instance
registers; takes a second or two on a CPU.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import AttentionPartial, Kernels, PagedRows, StepKv
from protos.infinite_llm.v1 import types_pb2
from services.common.ids import new_move_id, new_req_id
from services.worker.distattention.debtor import CreditorChannel, Peer, RemotePart
from services.worker.distattention.link import Borrowing
from services.worker.distattention.transfer import BlockSender
from services.worker.distattention.wire import Geometry
from services.worker.kvcache.lender import Lender
from services.worker.kvcache.lending import Owner
from services.worker.kvcache.storage import KvStorage
from services.worker.models.llama import LlamaFamilyModel, PackedTokens
from services.worker.rank import Rank

_BATCHES = (1, 8, 32)
_CONTEXT_TOKENS = 2048
_NUM_BLOCK_COPIES = 8


@dataclass(frozen=True, slots=True)
class LinkParts:
    """This instance's data plane, listening; its pool must be unused."""

    storage: KvStorage
    lender: Lender
    borrowing: Borrowing

    @property
    def me(self) -> Peer:
        return self.borrowing.me

    @property
    def geometry(self) -> Geometry:
        return self.borrowing.geometry


def measure_compute(
    model: LlamaFamilyModel, kernels: Kernels, storage: KvStorage
) -> types_pb2.PerfConstants:
    """Everything but the link."""
    return types_pb2.PerfConstants(
        non_attention=[
            types_pb2.BatchPoint(batch=batch, step_s=_non_attention_s(model, storage, batch))
            for batch in _BATCHES
        ],
        attention_s_per_token=_attention_s_per_token(model, kernels, storage),
        num_layers=model.config.num_layers,
    )


def measure_link(parts: LinkParts, perf: types_pb2.PerfConstants) -> None:
    """Add the link to `perf`: block copies and one layer's query, to ourselves."""
    owner = Owner(parts.me.inst_id, parts.me.incarnation)
    req_id, move_id = new_req_id(), new_move_id()
    num_blocks = max(1, min(_NUM_BLOCK_COPIES, parts.storage.num_blocks // 2))
    if parts.lender.reserve(owner, Rank(0, 0.0, req_id), move_id, num_blocks) is None:
        return  # so small that it will never lend
    try:
        sender = BlockSender(parts.borrowing, parts.me)
        blocks = [parts.storage.block(block_id) for block_id in range(num_blocks)]
        started = time.perf_counter()
        sender.send_blocks(move_id, blocks)
        copy_s = time.perf_counter() - started
        sender.close()
        perf.link_bytes_per_s = num_blocks * parts.geometry.block_bytes / copy_s
        perf.link_round_trip_s = _round_trip_s(parts, RemotePart(req_id, (move_id,), 1))
        perf.row_bytes = parts.geometry.query_bytes(1) + parts.geometry.partial_bytes(1)
    finally:
        parts.lender.release(owner, move_id)


def _non_attention_s(model: LlamaFamilyModel, storage: KvStorage, batch: int) -> float:
    """Of a step whose rows attend to nothing."""
    rows = PagedRows.build(
        [1] * batch, [()] * batch, [0] * batch,
        causal=True, num_blocks=storage.num_blocks, block_size=storage.shape.block_size,
    )  # fmt: skip
    zeros = torch.zeros(batch, dtype=torch.int64)
    tokens = PackedTokens(token_ids=zeros, positions=zeros, logits_rows=torch.arange(batch))
    return _best_s(lambda: model.forward(tokens, StepKv(storage.pool, zeros, rows)))


def _attention_s_per_token(model: LlamaFamilyModel, kernels: Kernels, storage: KvStorage) -> float:
    block_size = storage.shape.block_size
    num_blocks = min(storage.num_blocks, -(-_CONTEXT_TOKENS // block_size))
    num_tokens = num_blocks * block_size
    rows = PagedRows.build(
        [1], [range(num_blocks)], [num_tokens],
        causal=True, num_blocks=storage.num_blocks, block_size=block_size,
    )  # fmt: skip
    heads, dim = model.config.num_heads, model.config.head_dim
    q, out = torch.zeros(1, heads, dim), AttentionPartial.allocate(1, heads, dim)

    def all_layers() -> None:
        for layer in range(model.config.num_layers):
            kernels.micro_attention(q, storage.pool, layer, rows, out)

    return _best_s(all_layers) / num_tokens


def _round_trip_s(parts: LinkParts, part: RemotePart) -> float:
    channel = CreditorChannel(parts.borrowing, parts.me, 1)
    query = torch.zeros(1, parts.geometry.num_heads, parts.geometry.head_dim)

    def all_layers() -> None:
        channel.begin_step([part])
        for layer in range(parts.geometry.num_layers):
            channel.send_query(layer, query)
            channel.receive_partial(layer)

    try:
        return _best_s(all_layers) / parts.geometry.num_layers
    finally:
        channel.close()


def _best_s(function: Callable[[], object], repeats: int = 3) -> float:
    """The quickest of a few runs after a warm-up: the machine's rate, not its load."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)
