"""The creditor's end of one connection: answers attention, takes block copies and gives them back.

Run by `creditor.CreditorServer`, one thread each, beside the instance's own step. Any error is told
to the owner and ends the connection.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from isal.isal_zlib import crc32

from kernels.interface import Kernels
from kernels.partial import AttentionPartial, PagedRows
from services.common.errors import PartLost
from services.common.ids import MoveId
from services.worker.distattention.lender_protocol import Lender
from services.worker.distattention.memory import PartialBuffer, QueryBuffer, tensor_bytes
from services.worker.distattention.metrics import SideMetrics
from services.worker.distattention.transport.interface import NotTrusted, Stream
from services.worker.distattention.wire import (
    MAX_ERROR_TEXT_BYTES,
    ErrorCode,
    Geometry,
    Head,
    Hello,
    Kind,
    Peer,
    RemotePart,
    WireError,
    unpack_parts,
)
from services.worker.kvcache.lending import LentPart

#: The most rows of one query. A bound on what a connection may allocate, far above any batch.
MAX_ROWS = 1 << 16
_MAX_DRAIN_BYTES = 1 << 28

_log = logging.getLogger(__name__)


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


class Connection:
    def __init__(self, serving: Serving, stream: Stream) -> None:
        self._serving = serving
        self._stream = stream

    def run(self) -> None:
        """Serves until the peer hangs up, an error, or `shutdown`."""
        try:
            self._serve()
        except NotTrusted as error:
            self._serving.metrics.record_failure()
            _log.warning("refused the data plane's peer: %s", error)
        except OSError as error:
            _log.debug("connection ended: %s", error)
        except WireError as error:
            self._refuse(error.error, error.message)
        except PartLost as error:
            text = str(error).removeprefix(f"instance {error.inst_id}: ")
            self._refuse(ErrorCode.PART_LOST, text)
        except Exception:
            _log.exception("connection failed")
            self._refuse(ErrorCode.INTERNAL, "the creditor failed; its log says why")
        finally:
            self._stream.close()

    def shutdown(self) -> None:
        """Makes `run` return soon; called by another thread."""
        self._stream.shutdown()

    def _serve(self) -> None:
        session = _Session(self._serving, self._stream, self._greet())
        self._stream.send(Head(Kind.WELCOME))
        while True:
            head = self._stream.receive_head(may_idle=True)
            if head.kind is Kind.QUERY:
                session.answer(head)
            elif head.kind is Kind.PLAN:
                session.plan(head)
            elif head.kind is Kind.COPY:
                session.take_block(head)
            elif head.kind is Kind.FETCH:
                session.give_block(head)
            elif head.kind is Kind.PING:
                self._stream.receive_bytes(head.payload_bytes)
                self._stream.send(Head(Kind.PONG))
            else:
                raise WireError(ErrorCode.BAD_MESSAGE, f"{head.kind.name} is not for a creditor")

    def _greet(self) -> Hello:
        head = self._stream.receive_head()
        if head.kind is not Kind.HELLO:
            raise WireError(ErrorCode.BAD_MESSAGE, f"{head.kind.name} before HELLO")
        hello = Hello.unpack(self._stream.receive_bytes(head.payload_bytes))
        me = self._serving.me
        for what, theirs, ours in (
            ("instance", hello.creditor_inst_id, me.inst_id),
            ("incarnation", hello.creditor_incarnation, me.incarnation),
            ("geometry", hello.geometry, self._serving.geometry),
        ):
            if theirs != ours:
                raise WireError(ErrorCode.MISMATCH, f"{what} is {ours}, not {theirs}")
        if hello.max_rows > MAX_ROWS:
            text = f"takes {MAX_ROWS} rows at once, not {hello.max_rows}"
            raise WireError(ErrorCode.MISMATCH, text)
        return hello

    def _refuse(self, error: ErrorCode, text: str) -> None:
        _log.warning("refused the data plane's peer: %s: %s", error.name, text)
        self._serving.metrics.record_failure()
        try:
            self._stream.send(Head(Kind.ERROR, error), text.encode()[:MAX_ERROR_TEXT_BYTES])
        except OSError:
            return
        self._stream.drain(_MAX_DRAIN_BYTES)


class _Session:
    """What a welcome owner may do, and the memory that is its connection's."""

    def __init__(self, serving: Serving, stream: Stream, hello: Hello) -> None:
        self._serving = serving
        self._stream = stream
        self._hello = hello
        self._queries = QueryBuffer(serving.geometry, hello.max_rows)
        self._partials = PartialBuffer(serving.geometry, hello.max_rows)
        self._pool_bytes = tensor_bytes(serving.pool)
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
        self._step = _Step(
            head.ident, num_rows, parts, rows, query, query_bytes, partial, partial_bytes
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
        num_bytes = len(step.query_bytes) + len(step.partial_bytes)
        duration_s = time.perf_counter() - started
        self._serving.metrics.record_query(step.num_rows, num_bytes, duration_s)

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
