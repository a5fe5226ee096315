"""What a welcome owner may do on its connection: ask for attention, lend blocks and take them back.

Used by `connection` alone, on its thread.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from isal.isal_zlib import crc32

from kernels import AttentionPartial, Kernels, PagedRows, WiredPart, select_wired
from services.common.ids import MoveId
from services.worker.distattention.lender_protocol import Lender
from services.worker.distattention.memory import PartialBuffer, QueryBuffer, tensor_bytes
from services.worker.distattention.metrics import SideMetrics
from services.worker.distattention.transport.interface import Stream
from services.worker.distattention.wire import (
    ErrorCode,
    Geometry,
    Head,
    HeadsOfLayers,
    Hello,
    Kind,
    Peer,
    RemotePart,
    WireError,
    unpack_parts,
)
from services.worker.kvcache.lending import LentPart

#: How long a peer may take for one message it has begun.
MESSAGE_TIMEOUT_S = 10.0
#: Between two layers of a step, before the parts are let go: longer than most layers take.
_PATIENCE_S = 0.02


@dataclass(frozen=True, slots=True)
class Serving:
    """What every connection of one creditor serves from."""

    me: Peer
    geometry: Geometry
    lender: Lender
    pool: torch.Tensor
    kernels: Kernels
    metrics: SideMetrics


@dataclass(frozen=True, slots=True)
class _Step:
    """The PLAN in force, worked out once and used for all layers."""

    number: int
    num_rows: int
    parts: list[LentPart]
    rows: PagedRows
    query: torch.Tensor
    query_bytes: memoryview
    partial: AttentionPartial
    partial_bytes: memoryview
    wired: WiredPart | None


class Session:
    """One owner, and the memory that is its connection's."""

    def __init__(self, serving: Serving, stream: Stream, hello: Hello) -> None:
        self._serving = serving
        self._stream = stream
        self._hello = hello
        self._queries = QueryBuffer(serving.geometry, hello.max_rows)
        self._partials = PartialBuffer(serving.geometry, hello.max_rows)
        self._pool_bytes = tensor_bytes(serving.pool)
        self._query_heads = HeadsOfLayers(Kind.QUERY, serving.geometry.num_layers)
        self._partial_heads = HeadsOfLayers(Kind.PARTIAL, serving.geometry.num_layers)
        self._wired = select_wired(serving.kernels)
        self._step: _Step | None = None

    def plan(self, head: Head) -> None:
        self._step = None
        wanted = unpack_parts(self._stream.receive_bytes(head.payload_bytes))
        num_rows = sum(part.num_rows for part in wanted)
        if len(wanted) != head.item or num_rows != head.detail:
            raise WireError(ErrorCode.BAD_MESSAGE, "PLAN contradicts itself")
        if not 0 < num_rows <= self._hello.max_rows:
            raise WireError(ErrorCode.BAD_MESSAGE, f"PLAN of {num_rows} rows")
        parts = [self._open(part.move_ids) for part in wanted]
        query, query_bytes = self._queries.view(num_rows)
        partial, partial_bytes = self._partials.view(num_rows)
        rows = self._paged_rows(wanted, parts)
        wired = self._wired_part(head.ident, num_rows, query)
        self._step = _Step(
            head.ident, num_rows, parts, rows, query, query_bytes, partial, partial_bytes, wired
        )

    def answer(self, head: Head) -> None:
        step = self._step
        if step is None:
            raise WireError(ErrorCode.BAD_MESSAGE, "QUERY before PLAN")
        asked = (head.ident, head.detail, head.payload_bytes)
        if asked != (step.number, step.num_rows, len(step.query_bytes)):
            raise WireError(ErrorCode.BAD_MESSAGE, "QUERY contradicts its PLAN")
        if head.item >= self._serving.geometry.num_layers:
            raise WireError(ErrorCode.BAD_MESSAGE, f"there is no layer {head.item}")
        self._stream.receive_into(step.query_bytes)
        started = time.perf_counter()
        with self._in_use(step.parts):
            self._serving.kernels.micro_attention(
                step.query, self._serving.pool, head.item, step.rows, step.partial
            )
        answer = Head(Kind.PARTIAL, head.item, step.num_rows, step.number)
        self._stream.send(answer, step.partial_bytes)
        self._record(step, 1, time.perf_counter() - started)

    def answer_on(self, first: int) -> Head | None:
        """Layer `first` and those after it, as long as one query follows the other, without Python
        between them. Their parts stay pinned meanwhile. What came instead of a query, if anything.
        """
        step, kernels = self._step, self._wired
        if step is None or step.wired is None or kernels is None:
            return None
        if first >= self._serving.geometry.num_layers:
            return None
        started = time.perf_counter()
        with self._in_use(step.parts):
            done = kernels.answer_layers(
                step.wired, self._serving.pool, step.rows, first, _PATIENCE_S
            )
        self._record(step, done.num_sent, time.perf_counter() - started - done.waited_s)
        if done.error is not None:
            raise done.error
        return Head.unpack(done.head) if done.head else None

    def _record(self, step: _Step, num_queries: int, duration_s: float) -> None:
        num_bytes = len(step.query_bytes) + len(step.partial_bytes)
        self._serving.metrics.record_queries(num_queries, step.num_rows, num_bytes, duration_s)

    def _wired_part(self, step: int, num_rows: int, query: torch.Tensor) -> WiredPart | None:
        socket, geometry = self._stream.plain_socket(), self._serving.geometry
        if socket is None:
            return None
        return WiredPart(
            socket,
            MESSAGE_TIMEOUT_S,
            self._partial_heads.of_step(step, num_rows, geometry.partial_bytes(num_rows)),
            self._query_heads.of_step(step, num_rows, geometry.query_bytes(num_rows)),
            query,
            self._partials.values(num_rows),
        )

    def take_block(self, head: Head) -> None:
        block_bytes = self._serving.geometry.block_bytes
        if head.payload_bytes != block_bytes:
            text = f"a block has {block_bytes} bytes, not {head.payload_bytes}"
            raise WireError(ErrorCode.BAD_MESSAGE, text)
        started = time.perf_counter()
        move_id = MoveId(head.ident)
        owner = self._hello
        block_id = self._serving.lender.begin_receive(
            owner.owner_inst_id, owner.owner_incarnation, move_id, head.item
        )
        is_intact = False
        try:
            block = self._block(block_id)
            self._stream.receive_into(block)
            is_intact = crc32(block) == head.detail
        finally:
            self._serving.lender.end_receive(move_id, head.item, is_intact)
        if not is_intact:
            text = f"move {move_id} block {head.item} does not match its checksum"
            raise WireError(ErrorCode.BAD_CHECKSUM, text)
        self._stream.send(Head(Kind.ACK, head.item, 0, move_id))
        self._serving.metrics.record_blocks(1, block_bytes, time.perf_counter() - started)

    def give_block(self, head: Head) -> None:
        """The owner takes the block back, or lends it on; here it stays until it is released."""
        started = time.perf_counter()
        move_id, block_bytes = MoveId(head.ident), self._serving.geometry.block_bytes
        part = self._open((move_id,))
        if head.item >= len(part.block_ids):
            raise WireError(ErrorCode.BAD_MESSAGE, f"move {move_id} has no block {head.item}")
        with self._in_use([part]):
            block = self._block(part.block_ids[head.item])
            self._stream.send(Head(Kind.BLOCK, head.item, crc32(block), move_id), block)
        self._serving.metrics.record_blocks(1, block_bytes, time.perf_counter() - started)

    def _block(self, block_id: int) -> memoryview:
        block_bytes = self._serving.geometry.block_bytes
        return self._pool_bytes[block_id * block_bytes : (block_id + 1) * block_bytes]

    def _open(self, move_ids: tuple[MoveId, ...]) -> LentPart:
        owner = self._hello
        return self._serving.lender.open_part(
            owner.owner_inst_id, owner.owner_incarnation, move_ids
        )

    def _paged_rows(self, wanted: Sequence[RemotePart], parts: Sequence[LentPart]) -> PagedRows:
        block_size = self._serving.geometry.block_size
        return PagedRows.build(
            [part.num_rows for part in wanted],
            [part.block_ids for part in parts],
            [len(part.block_ids) * block_size for part in parts],
            causal=False,
            num_blocks=self._serving.pool.shape[0],
            block_size=block_size,
        )

    @contextmanager
    def _in_use(self, parts: Sequence[LentPart]) -> Iterator[None]:
        """Pins every part, at every layer anew: a lease may have ended since the last one."""
        lender = self._serving.lender
        with ExitStack() as pinned:
            for part in parts:
                lender.begin_use(part)
                pinned.callback(lender.end_use, part)
            yield
