"""The copies of one move, piece by piece. Used by the mover; runs on its copy thread."""

from collections.abc import Sequence

from services.common.ids import MoveId
from services.worker.distattention.debtor import Peer
from services.worker.distattention.transfer import BlockSender
from services.worker.rmanager.transfer_parts import TransferParts


class BlockCopy:
    def __init__(
        self, parts: TransferParts, peer: Peer, move_id: MoveId, block_ids: Sequence[int]
    ) -> None:
        self._parts = parts
        self._peer = peer
        self._move_id = move_id
        self._block_ids = block_ids
        self._num_sent = 0
        self._sender: BlockSender | None = None

    @property
    def num_left(self) -> int:
        return len(self._block_ids) - self._num_sent

    def send(self, num_blocks: int) -> None:
        """The next so many; returns once all of them are acknowledged. Raises PartLost."""
        if self._sender is None:
            self._sender = self._parts.open_sender(self._peer)
        piece = self._block_ids[self._num_sent :][:num_blocks]
        blocks = (self._parts.storage.block(block_id) for block_id in piece)
        self._sender.send_blocks(self._move_id, blocks, self._num_sent)
        self._num_sent += len(piece)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
