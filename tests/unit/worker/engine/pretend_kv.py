"""KV that says what it was computed from: a plan can be checked without a model.

The KV of a token is a digest of all tokens up to it. A step that reads anything else than exactly
the KV of what lies before it, in blocks here and spans elsewhere, is caught at once.
"""

from collections.abc import Sequence
from itertools import islice

from services.common.ids import MoveId
from services.worker.engine.sequence import Schedule, ScheduledSequence
from services.worker.kvcache.block_table import Context, RemoteSpan

Block = list[int | None]


class PretendKv:
    """The blocks of one instance by id, and what creditors hold by move."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._blocks: list[Block] = [[None] * block_size for _ in range(num_blocks)]
        self._spans: dict[MoveId, list[Block]] = {}

    def poison(self, block_ids: Sequence[int]) -> None:
        """Their content is given up."""
        for block_id in block_ids:
            self._blocks[block_id] = [None] * self._size

    def copy_out(self, block_ids: Sequence[int]) -> list[Block]:
        return [list(self._blocks[block_id]) for block_id in block_ids]

    def commit(self, span: RemoteSpan, blocks: list[Block]) -> None:
        self._spans[span.move_id] = blocks

    def take_back(self, span: RemoteSpan, block_ids: Sequence[int]) -> None:
        for block_id, block in zip(block_ids, self._spans[span.move_id], strict=True):
            self._blocks[block_id] = list(block)

    def lend_on(self, span: RemoteSpan, by: Sequence[RemoteSpan]) -> None:
        blocks = iter(self._spans[span.move_id])
        for part in by:
            self._spans[part.move_id] = list(islice(blocks, part.num_blocks))

    def run(self, plan: Schedule) -> None:
        """Write the KV of every item first, as each layer does; then check what each reads."""
        for item in plan.items:
            kv = _kv_of(item)
            for position in range(item.start, item.end):
                block, offset = divmod(item.sequence.table.slot(position), self._size)
                self._blocks[block][offset] = kv[position]
        for item in plan.items:
            self._check_reads(item, item.sequence.table.context(item.end))

    def _check_reads(self, item: ScheduledSequence, context: Context) -> None:
        slots = [kv for block_id in context.local for kv in self._blocks[block_id]]
        num_local = item.end - context.num_remote_tokens
        assert num_local <= len(slots)
        spans = [self._spans[span.move_id] for span in context.remote]
        remote = [kv for span in spans for block in span for kv in block]
        assert len(remote) == context.num_remote_tokens
        read = slots[:num_local] + remote
        assert None not in read, f"request {item.sequence.req_id} reads what is not there"
        # Causal: the chunk's own tokens must be the last of the local ones.
        assert slots[num_local - item.num_tokens : num_local] == _kv_of(item)[item.start :]
        assert sorted(kv for kv in read if kv is not None) == sorted(_kv_of(item))


def _kv_of(item: ScheduledSequence) -> list[int]:
    """Of all tokens up to the end of the item."""
    digests, last = [], hash(item.sequence.request.cache_salt)
    for token_id in item.sequence.token_ids[: item.end]:
        last = hash((last, token_id))
        digests.append(last)
    return digests
