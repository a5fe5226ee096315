"""What goes into and comes out of MicroAttention: which rows read which blocks, and (MA, m, e).

The engine and the creditor build `PagedRows` once per step; the kernels read them once per layer.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionPartial:
    """The paper's (MA, m, e) of some rows over some part of their context; float32, contiguous.

    The empty part is the neutral element of merging: acc 0, max -inf, sum 0.
    """

    acc: Tensor
    max: Tensor
    sum: Tensor

    @classmethod
    def allocate(cls, rows: int, heads: int, dim: int, device: torch.device | str = "cpu") -> Self:
        """Uninitialised memory, for a kernel that writes every row."""
        return cls(
            acc=torch.empty(rows, heads, dim, device=device),
            max=torch.empty(rows, heads, device=device),
            sum=torch.empty(rows, heads, device=device),
        )

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int, device: torch.device | str = "cpu") -> Self:
        """The neutral element."""
        return cls(
            acc=torch.zeros(rows, heads, dim, device=device),
            max=torch.full((rows, heads), -torch.inf, device=device),
            sum=torch.zeros(rows, heads, device=device),
        )

    @property
    def num_rows(self) -> int:
        return self.acc.shape[0]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Which query rows read which blocks: ragged, no padding; int32, contiguous."""

    row_start: Tensor
    """[num_seqs + 1]: the rows of sequence i are row_start[i]..row_start[i + 1]."""
    table_start: Tensor
    """[num_seqs + 1]: its blocks are block_ids[table_start[i]..table_start[i + 1]]."""
    block_ids: Tensor
    kv_len: Tensor
    """[num_seqs]: tokens it may see in those blocks (its newest row, when causal)."""
    causal: bool
    """True: row j of n sees kv_len - (n - 1 - j) tokens, none if <= 0. False: all see kv_len."""

    @classmethod
    def build(
        cls,
        num_rows: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv_len: Sequence[int],
        *,
        causal: bool,
        num_blocks: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """One entry per sequence in each list; raises ValueError where they do not fit the pool."""
        if not len(num_rows) == len(block_tables) == len(kv_len):
            raise ValueError(
                f"num_rows, block_tables and kv_len name {len(num_rows)}, {len(block_tables)} "
                f"and {len(kv_len)} sequences"
            )
        rows = cls(
            row_start=_int32(accumulate(num_rows, initial=0)),
            table_start=_int32(accumulate(map(len, block_tables), initial=0)),
            block_ids=_int32(chain.from_iterable(block_tables)),
            kv_len=_int32(kv_len),
            causal=causal,
        )
        rows.validate(num_blocks, block_size)
        return rows.to(device)

    @property
    def num_seqs(self) -> int:
        return self.kv_len.shape[0]

    def to(self, device: torch.device | str) -> Self:
        return type(self)(
            row_start=self.row_start.to(device),
            table_start=self.table_start.to(device),
            block_ids=self.block_ids.to(device),
            kv_len=self.kv_len.to(device),
            causal=self.causal,
        )

    def validate(self, num_blocks: int, block_size: int) -> None:
        """Raise ValueError unless every slot that may be read lies in a pool of this size."""
        for name in ("row_start", "table_start", "block_ids", "kv_len"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be a contiguous int32 vector")
        for name, starts in (("row_start", self.row_start), ("table_start", self.table_start)):
            if starts.shape[0] != self.num_seqs + 1 or int(starts[0]) != 0:
                raise ValueError(f"{name} must hold num_seqs + 1 offsets from 0")
            if bool((starts.diff() < 0).any()):
                raise ValueError(f"{name} must not decrease")
        if int(self.table_start[-1]) != self.block_ids.shape[0]:
            raise ValueError("table_start must end at the number of block ids")
        if bool(((self.block_ids < 0) | (self.block_ids >= num_blocks)).any()):
            raise ValueError(f"block ids must lie in 0..{num_blocks - 1}")
        if bool((self.kv_len > self.table_start.diff() * block_size).any()):
            raise ValueError("kv_len exceeds the slots of the sequence's blocks")


def _int32(values: Iterable[int]) -> Tensor:
    try:
        buffer = array("i", values)
    except OverflowError as error:
        raise ValueError(f"not an int32: {error}") from error
    return (
        torch.frombuffer(buffer, dtype=torch.int32) if buffer else torch.empty(0, dtype=torch.int32)
    )
