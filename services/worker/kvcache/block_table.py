"""Where the KV of one sequence lies: remote spans first, then local blocks. Pure.

Blocks move oldest first, so what other instances hold is always a prefix of the sequence and the
growing tail is always local. Called by the scheduler (grow, shrink) and the engine (commit a move).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.ids import Incarnation, InstId, MoveId, ReqId


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """Consecutive full blocks that one move put on one creditor.

    `req_id` is the request that the move was for; others with the same prefix may read it, too.
    """

    req_id: ReqId
    inst_id: InstId
    incarnation: Incarnation
    move_id: MoveId
    num_blocks: int


@dataclass(slots=True)
class BlockTable:
    """The ordered spans of one sequence."""

    block_size: int
    remote: list[RemoteSpan] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    num_remote_blocks: int = 0
    """The sum over `remote`, kept because every token of every step asks for it."""

    @property
    def num_remote_tokens(self) -> int:
        return self.num_remote_blocks * self.block_size

    @property
    def num_blocks(self) -> int:
        return self.num_remote_blocks + len(self.local)

    def blocks_to_reach(self, num_tokens: int) -> int:
        """How many more blocks a sequence of `num_tokens` tokens needs."""
        return max(0, -(-num_tokens // self.block_size) - self.num_blocks)

    def num_movable(self, num_computed: int) -> int:
        """Local blocks that are full, hence immutable, when `num_computed` tokens have their KV."""
        return max(0, num_computed // self.block_size - self.num_remote_blocks)

    def append(self, block_ids: Sequence[int]) -> None:
        self.local.extend(block_ids)

    def attach(self, spans: Sequence[RemoteSpan]) -> None:
        """Begin with what creditors hold already; the table must not have local blocks yet."""
        if self.local:
            raise ValueError("remote spans come before local blocks")
        self.remote.extend(spans)
        self.num_remote_blocks += sum(span.num_blocks for span in spans)

    def slot(self, position: int) -> int:
        """The storage slot of the token at `position`; it must be local."""
        block, offset = divmod(position - self.num_remote_tokens, self.block_size)
        if block < 0:
            raise IndexError(f"position {position} is not local")
        return self.local[block] * self.block_size + offset

    def commit_move(self, span: RemoteSpan) -> list[int]:
        """The oldest `span.num_blocks` local blocks lie on the creditor now; returns their ids."""
        moved, self.local = self.local[: span.num_blocks], self.local[span.num_blocks :]
        if len(moved) != span.num_blocks:
            raise ValueError(f"only {len(moved)} local blocks, cannot commit {span.num_blocks}")
        self.remote.append(span)
        self.num_remote_blocks += span.num_blocks
        return moved

    def clear(self) -> tuple[list[int], list[RemoteSpan]]:
        """Empty the table; returns what the caller must free here and release elsewhere."""
        local, remote = self.local, self.remote
        self.local, self.remote, self.num_remote_blocks = [], [], 0
        return local, remote
