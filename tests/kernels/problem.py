"""A batch of paged sequences with everything that must not be read set to NaN."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels import AttentionPartial, Kernels, PagedRows
from kernels.reference import ReferenceKernels

LAYER = 1


@dataclass(frozen=True)
class Shape:
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = True


@dataclass(frozen=True)
class Problem:
    shape: Shape
    num_rows: Sequence[int]
    kv_len: Sequence[int]
    keys: list[Tensor]
    """Per sequence [kv_len, num_kv_heads, head_dim], exact in the pool's dtype."""
    values: list[Tensor]
    slots: Tensor
    pool: Tensor
    rows: PagedRows
    q: Tensor

    @classmethod
    def make(
        cls, shape: Shape, num_rows: Sequence[int], kv_len: Sequence[int], seed: int = 0
    ) -> "Problem":
        """Blocks lie in random order; blocks of other layers and slots past kv_len are NaN."""
        random = torch.Generator().manual_seed(seed)
        heads, dim, block_size = shape.num_kv_heads, shape.head_dim, shape.block_size
        counts = [(max(length, 0) + block_size - 1) // block_size for length in kv_len]
        num_blocks = sum(counts) + 2
        order = torch.randperm(num_blocks, generator=random).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        lengths = [max(length, 0) for length in kv_len]

        def draw(length: int) -> Tensor:
            drawn = torch.randn(length, heads, dim, generator=random)
            return drawn.to(shape.dtype).float()

        keys, values = [draw(n) for n in lengths], [draw(n) for n in lengths]
        slots = [
            table[token // block_size] * block_size + token % block_size
            for table, length in zip(tables, lengths, strict=True)
            for token in range(length)
        ]
        problem = cls(
            shape=shape,
            num_rows=num_rows,
            kv_len=kv_len,
            keys=keys,
            values=values,
            slots=torch.tensor(slots, dtype=torch.int64),
            pool=torch.full((num_blocks, 3, 2, heads, block_size, dim), torch.nan).to(shape.dtype),
            rows=PagedRows.build(
                num_rows, tables, kv_len,
                causal=shape.causal, num_blocks=num_blocks, block_size=block_size,
            ),
            q=torch.randn(sum(num_rows), shape.num_heads, dim, generator=random) / dim**0.5,
        )  # fmt: skip
        problem.write(ReferenceKernels(), problem.pool)
        return problem

    def write(self, kernels: Kernels, pool: Tensor) -> None:
        none = torch.empty(0, self.shape.num_kv_heads, self.shape.head_dim)
        keys, values = torch.cat([none, *self.keys]), torch.cat([none, *self.values])
        kernels.write_kv(pool, LAYER, keys, values, self.slots)

    def attend(self, kernels: Kernels) -> AttentionPartial:
        """What the kernels write over a partial full of NaN."""
        out = AttentionPartial.allocate(*self.q.shape)
        for tensor in (out.acc, out.max, out.sum):
            tensor.fill_(torch.nan)
        kernels.micro_attention(self.q, self.pool, LAYER, self.rows, out)
        return out

    def output(self, kernels: Kernels) -> Tensor:
        partial = self.attend(kernels)
        out = torch.full((self.q.shape[0], self.q[0].numel()), torch.nan)
        kernels.finalize(partial, out)
        return out

    def expected_output(self) -> Tensor:
        """Softmax attention in float64, one row at a time; zero where a row sees nothing."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        group = self.shape.num_heads // self.shape.num_kv_heads
        starts = self.rows.row_start.tolist()
        for seq, (first, last) in enumerate(pairwise(starts)):
            for row in range(first, last):
                hidden = last - 1 - row if self.shape.causal else 0
                visible = self.kv_len[seq] - hidden
                if visible <= 0:
                    continue
                keys = self.keys[seq][:visible].double().repeat_interleave(group, dim=1)
                values = self.values[seq][:visible].double().repeat_interleave(group, dim=1)
                weights = torch.einsum("hd,thd->ht", self.q[row].double(), keys).softmax(dim=-1)
                out[row] = torch.einsum("ht,thd->hd", weights, values)
        return out.flatten(1)


def assert_same_partial(
    actual: AttentionPartial, expected: AttentionPartial, tolerance: float = 1e-5
) -> None:
    """Equal up to rounding; empty parts exactly neutral, so NaN or a finite max fails."""
    is_empty = expected.max == -torch.inf
    assert torch.equal(actual.max == -torch.inf, is_empty)
    assert not actual.acc[is_empty].any()
    assert not actual.sum[is_empty].any()
    torch.testing.assert_close(actual.max, expected.max, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual.sum, expected.sum, rtol=tolerance, atol=tolerance)
    scale = expected.sum.clamp(min=1.0)[..., None]
    torch.testing.assert_close(
        actual.acc / scale, expected.acc / scale, rtol=tolerance, atol=tolerance
    )
