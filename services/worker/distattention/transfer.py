"""Block copies between an owner and one creditor, there and back. Used by the copy thread.

A block goes from the pool's own memory into the socket and, at the other end, from the socket into
the block that is meant for it. It counts as copied once whoever received it has verified it.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence

from isal.isal_zlib import crc32

from services.common.errors import InternalError
from services.common.ids import MoveId
from services.worker.distattention.link import Borrowing, PeerLink
from services.worker.distattention.wire import ErrorCode, Head, Kind, Peer, WireError

# Enough to keep the line busy while the other end verifies; what has no payload (acknowledgements,
# and requests to fetch) always fits the sockets' buffers in such numbers, so that neither end waits
# for the other to read.
_WINDOW_BLOCKS = 4


class _BlockLink:
    """One connection, opened by the constructor. Every failure is PartLost, and closes it."""

    def __init__(self, borrowing: Borrowing, creditor: Peer) -> None:
        self._block_bytes = borrowing.geometry.block_bytes
        self._metrics = borrowing.metrics
        self._creditor, self._on_blocks = creditor, borrowing.on_blocks
        self._link = PeerLink(borrowing, creditor, 0)

    def close(self) -> None:
        self._link.close()

    def _record(self, num_blocks: int, started: float) -> None:
        if not num_blocks:
            return
        num_bytes, duration_s = num_blocks * self._block_bytes, time.perf_counter() - started
        self._on_blocks(self._creditor, num_bytes, duration_s)
        if self._metrics is not None:
            self._metrics.record_blocks(num_blocks, num_bytes, duration_s)

    def _check_size(self, block: memoryview) -> None:
        if block.nbytes != self._block_bytes:
            raise InternalError(f"a block of {block.nbytes} bytes, not {self._block_bytes}")


class BlockSender(_BlockLink):
    """Owner to creditor: into what a move reserved there."""

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

    def _send(self, move_id: MoveId, index: int, block: memoryview) -> None:
        self._check_size(block)
        with self._link as link:
            link.send(Head(Kind.COPY, index, crc32(block), move_id), block.cast("B"))

    def _await_ack(self, move_id: MoveId, index: int) -> None:
        with self._link as link:
            head = link.expect(Kind.ACK)
            if (head.ident, head.item) != (move_id, index):
                text = f"ACK of move {head.ident} block {head.item}, not {move_id} block {index}"
                raise WireError(ErrorCode.BAD_MESSAGE, text)


class BlockFetcher(_BlockLink):
    """Creditor to owner: what a move brought there. The creditor keeps its copy."""

    def fetch_blocks(
        self, move_id: MoveId, blocks: Sequence[memoryview], first_index: int = 0
    ) -> None:
        """Fills `blocks` with those of the move from `first_index` on; returns when all are
        verified. After a failure their content means nothing."""
        started = time.perf_counter()
        for block in blocks:
            self._check_size(block)
        with self._link as link:
            for index in range(first_index, first_index + len(blocks[:_WINDOW_BLOCKS])):
                link.send(Head(Kind.FETCH, index, 0, move_id))
            for index, block in enumerate(blocks, first_index):
                self._receive(move_id, index, block)
                if index + _WINDOW_BLOCKS < first_index + len(blocks):
                    link.send(Head(Kind.FETCH, index + _WINDOW_BLOCKS, 0, move_id))
        self._record(len(blocks), started)

    def _receive(self, move_id: MoveId, index: int, block: memoryview) -> None:
        head = self._link.expect(Kind.BLOCK)
        if (head.ident, head.item, head.payload_bytes) != (move_id, index, block.nbytes):
            text = f"answer {head} to the request for move {move_id} block {index}"
            raise WireError(ErrorCode.BAD_MESSAGE, text)
        self._link.receive_into(block.cast("B"))
        if crc32(block) != head.detail:
            text = f"move {move_id} block {index} does not match its checksum"
            raise WireError(ErrorCode.BAD_CHECKSUM, text)
