"""What goes into and comes out of MicroAttention: which rows read which blocks, and (MA, m, e).

The engine and the creditor build `PagedRows` once per step; the kernels read them once per layer.
Both check their own layout once, when they are made, so that the kernels need not at every call.
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
    """[rows, num_heads, head_dim]: sum of exp(s_i - max) V_i, not normalised."""
    max: Tensor
    """[rows, num_heads]"""
    sum: Tensor
    """[rows, num_heads]: sum of exp(s_i - max)."""

    def __post_init__(self) -> None:
        if self.acc.dim() != 3 or self.max.shape != self.acc.shape[:2]:
            raise ValueError(
                "acc must be [rows, num_heads, head_dim] and max [rows, num_heads], "
                f"not {list(self.acc.shape)} and {list(self.max.shape)}"
            )
        check_tensor("acc", self.acc, torch.float32)
        check_tensor("max", self.max, torch.float32)
        check_tensor("sum", self.sum, torch.float32, self.max.shape)

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

    def __post_init__(self) -> None:
        num_starts = torch.Size((self.kv_len.numel() + 1,))
        check_tensor("row_start", self.row_start, torch.int32, num_starts)
        check_tensor("table_start", self.table_start, torch.int32, num_starts)
        check_tensor(
            "block_ids", self.block_ids, torch.int32, torch.Size((self.block_ids.numel(),))
        )
        check_tensor("kv_len", self.kv_len, torch.int32, torch.Size((self.kv_len.numel(),)))

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
        for name, starts in (("row_start", self.row_start), ("table_start", self.table_start)):
            if int(starts[0]) != 0 or bool((starts.diff() < 0).any()):
                raise ValueError(f"{name} must begin with 0 and not decrease")
        if int(self.table_start[-1]) != self.block_ids.shape[0]:
            raise ValueError("table_start must end at the number of block ids")
        if bool(((self.block_ids < 0) | (self.block_ids >= num_blocks)).any()):
            raise ValueError(f"block ids must lie in 0..{num_blocks - 1}")
        if bool((self.kv_len > self.table_start.diff() * block_size).any()):
            raise ValueError("kv_len exceeds the slots of the sequence's blocks")


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: torch.Size | None = None
) -> None:
    """Raise ValueError unless the tensor is laid out as the kernels address it."""
    if (
        tensor.dtype != dtype
        or not tensor.is_contiguous()
        or (shape is not None and tensor.shape != shape)
    ):
        raise ValueError(
            f"{name} must be contiguous {dtype} of {'any shape' if shape is None else list(shape)},"
            f" not {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        )


def _int32(values: Iterable[int]) -> Tensor:
    try:
        buffer = array("i", values)
    except OverflowError as error:
        raise ValueError(f"not an int32: {error}") from error
    return (
        torch.frombuffer(buffer, dtype=torch.int32) if buffer else torch.empty(0, dtype=torch.int32)
    )
