"""The bytes of the KVCache: one tensor, allocated once, block outermost.

pool[num_blocks][num_layers][2 = K, V][num_kv_heads][block_size][head_dim]
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * self.block_size * self.dtype.itemsize


class KvStorage:
    """Host memory on huge pages, since the blocks of one request are scattered over it."""

    def __init__(self, num_blocks: int, shape: KvShape) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self._memory = mmap.mmap(-1, num_blocks * shape.block_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        flat = torch.frombuffer(self._memory, dtype=shape.dtype)
        self.pool = flat.view(
            num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim
        )

    def block(self, block_id: int) -> memoryview:
        """All layers of one block as bytes, without a copy."""
        start = block_id * self.shape.block_bytes
        return memoryview(self._memory)[start : start + self.shape.block_bytes]

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that whoever still reads them cannot go unnoticed."""
        for block_id in block_ids:
            self.pool[block_id] = torch.nan
