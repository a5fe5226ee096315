"""Block copies, owner to one destination. Used by the mover's thread.

A block goes from the pool's own memory into the socket and, at the other end, from the socket into
the reserved block. It counts as copied once the destination has verified and acknowledged it.
"""

import time
import zlib
from collections import deque
from collections.abc import Iterable

from services.common.errors import InternalError
from services.common.ids import MoveId
from services.worker.distattention.link import PeerLink
from services.worker.distattention.metrics import SideMetrics
from services.worker.distattention.wire import ErrorCode, Geometry, Head, Kind, Peer, WireError

# Enough to keep the line busy while the destination verifies; acknowledgements of one window always
# fit the sockets' buffers, so that neither end waits for the other to read.
_WINDOW_BLOCKS = 4


class BlockSender:
    """One connection, opened by the constructor. Every failure is PartLost, and closes it."""

    def __init__(
        self,
        me: Peer,
        destination: Peer,
        geometry: Geometry,
        deadline_s: float,
        metrics: SideMetrics | None = None,
    ) -> None:
        self._block_bytes = geometry.block_bytes
        self._metrics = metrics
        self._link = PeerLink(me, destination, geometry, 0, deadline_s, metrics)

    def send_block(self, move_id: MoveId, index: int, block: memoryview) -> None:
        """Returns once the destination has the block. `index` counts within the move."""
        started = time.perf_counter()
        self._send(move_id, index, block)
        self._await_ack(move_id, index)
        self._record(1, started)

    def send_blocks(
        self, move_id: MoveId, blocks: Iterable[memoryview], first_index: int = 0
    ) -> None:
        """Sends a run of blocks without waiting for each; returns once all are acknowledged."""
        started = time.perf_counter()
        waiting: deque[int] = deque()
        num_blocks = 0
        for num_blocks, block in enumerate(blocks, 1):
            index = first_index + num_blocks - 1
            if len(waiting) == _WINDOW_BLOCKS:
                self._await_ack(move_id, waiting.popleft())
            self._send(move_id, index, block)
            waiting.append(index)
        for index in waiting:
            self._await_ack(move_id, index)
        self._record(num_blocks, started)

    def close(self) -> None:
        self._link.close()

    def _send(self, move_id: MoveId, index: int, block: memoryview) -> None:
        if block.nbytes != self._block_bytes:
            raise InternalError(f"a block of {block.nbytes} bytes, not {self._block_bytes}")
        with self._link as link:
            link.send(Head(Kind.COPY, index, zlib.crc32(block), move_id), block.cast("B"))

    def _await_ack(self, move_id: MoveId, index: int) -> None:
        with self._link as link:
            head = link.expect(Kind.ACK)
            if (head.ident, head.item) != (move_id, index):
                text = f"ACK of move {head.ident} block {head.item}, not {move_id} block {index}"
                raise WireError(ErrorCode.BAD_MESSAGE, text)

    def _record(self, num_blocks: int, started: float) -> None:
        if self._metrics is not None and num_blocks:
            duration_s = time.perf_counter() - started
            self._metrics.record_blocks(num_blocks, num_blocks * self._block_bytes, duration_s)
