"""The owner's side of DistAttention: asks one creditor for its part of every layer's attention.

Used by the engine thread alone. Per step: `begin_step`, then for each layer `send_query`, the
local part meanwhile, `receive_partial`, merge; or, where the kernels do that by themselves, `wired`
for all layers and `finish`.

Neither end can block the other: the creditor reads a query whole before it answers, and the owner
never sends while an answer is outstanding. So a query or a partial may be larger than what the
sockets buffer.
"""

import time
from collections.abc import Sequence

import torch

from kernels import AttentionPartial, Exchanged, WiredPart
from services.common.errors import InternalError
from services.worker.distattention.link import Borrowing, PeerLink
from services.worker.distattention.memory import PartialBuffer, QueryBuffer, tensor_bytes
from services.worker.distattention.wire import (
    ErrorCode,
    Head,
    HeadsOfLayers,
    Kind,
    Peer,
    RemotePart,
    WireError,
    pack_parts,
)

__all__ = ["CreditorChannel", "Peer", "RemotePart"]


class CreditorChannel:
    """One owner's connection to one creditor, opened by the constructor.

    Every failure of the other side or of the connection is PartLost, and the channel is closed
    from then on. Misuse by the engine is InternalError and sends nothing.
    """

    def __init__(self, borrowing: Borrowing, creditor: Peer, max_rows: int) -> None:
        self._geometry = borrowing.geometry
        self._max_rows = max_rows
        self._metrics = borrowing.metrics
        self._deadline_s = borrowing.deadline_s
        self._queries = QueryBuffer(borrowing.geometry, max_rows)
        self._buffer = PartialBuffer(borrowing.geometry, max_rows)
        self._query_heads = HeadsOfLayers(Kind.QUERY, borrowing.geometry.num_layers)
        self._partial_heads = HeadsOfLayers(Kind.PARTIAL, borrowing.geometry.num_layers)
        self._partial, self._partial_bytes = self._buffer.view(0)
        self._num_rows = 0
        self._step = 0
        self._pending_layer: int | None = None
        self._link = PeerLink(borrowing, creditor, max_rows)

    def begin_step(self, parts: Sequence[RemotePart]) -> None:
        """Tells the creditor which parts the rows of this step read: rows of parts[0] first."""
        num_rows = sum(part.num_rows for part in parts)
        if not 0 < num_rows <= self._max_rows:
            raise InternalError(f"{num_rows} rows in a step, at most {self._max_rows}")
        if self._pending_layer is not None:
            # A step that was given up midway (another creditor was lost) left one answer behind.
            self.receive_partial(self._pending_layer)
        self._step += 1
        self._num_rows = num_rows
        self._partial, self._partial_bytes = self._buffer.view(num_rows)
        with self._link as link:
            link.send(Head(Kind.PLAN, len(parts), num_rows, self._step), pack_parts(parts))

    def send_query(self, layer: int, q: torch.Tensor) -> None:
        """`q`: float32 [rows, num_heads, head_dim], scaled. May be reused once this returns."""
        expected = (self._num_rows, self._geometry.num_heads, self._geometry.head_dim)
        if q.shape != expected or q.dtype != torch.float32:
            raise InternalError(f"query {q.dtype} {tuple(q.shape)}, not float32 {expected}")
        if self._pending_layer is not None:
            raise InternalError(f"the partial of layer {self._pending_layer} was not received")
        with self._link as link:
            head = Head(Kind.QUERY, layer, self._num_rows, self._step)
            link.send(head, tensor_bytes(q.contiguous()))
        self._pending_layer = layer

    def receive_partial(self, layer: int) -> AttentionPartial:
        """The answer to the query of this layer: views that are valid until the next call."""
        if self._pending_layer != layer:
            raise InternalError(f"no query of layer {layer} is under way")
        self._pending_layer = None
        started = time.perf_counter()
        with self._link as link:
            head = link.expect(Kind.PARTIAL)
            size = len(self._partial_bytes)
            if head != (Kind.PARTIAL, layer, self._num_rows, self._step, size):
                text = f"answer {head} to layer {layer}, {self._num_rows} rows, step {self._step}"
                raise WireError(ErrorCode.BAD_MESSAGE, text)
            link.receive_into(self._partial_bytes)
        if self._metrics is not None:
            num_bytes = size + self._geometry.query_bytes(self._num_rows)
            self._metrics.record_queries(
                1, self._num_rows, num_bytes, time.perf_counter() - started
            )
        return self._partial

    def wired(self, row_ids: torch.Tensor) -> WiredPart | None:
        """The step that was begun, for kernels that ask all layers; None if the transport has no
        socket for them. `row_ids`: int64, which rows of the step are asked about."""
        with self._link as link:
            socket = link.plain_socket()
        if socket is None:
            return None
        num_rows, geometry = self._num_rows, self._geometry
        query, _ = self._queries.view(num_rows)
        return WiredPart(
            socket,
            self._deadline_s,
            self._query_heads.of_step(self._step, num_rows, geometry.query_bytes(num_rows)),
            self._partial_heads.of_step(self._step, num_rows, geometry.partial_bytes(num_rows)),
            query,
            self._buffer.values(num_rows),
            row_ids,
        )

    def finish(self, exchanged: Exchanged) -> None:
        """What came of the wired part of this step. Raises PartLost."""
        if self._metrics is not None:
            num_bytes = len(self._partial_bytes) + self._geometry.query_bytes(self._num_rows)
            self._metrics.record_queries(
                exchanged.num_received, self._num_rows, num_bytes, exchanged.waited_s
            )
        if exchanged.num_sent > exchanged.num_received:
            self._pending_layer = exchanged.num_sent - 1
        if not exchanged.has_failed:
            return
        with self._link as link:
            if exchanged.error is not None:
                raise exchanged.error
            head = link.checked(Head.unpack(exchanged.head), Kind.PARTIAL)
            raise WireError(ErrorCode.BAD_MESSAGE, f"answer {head} to another query")

    def close(self) -> None:
        self._link.close()
