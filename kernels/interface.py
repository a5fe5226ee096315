"""The one interface of the kernels: tensors in, tensors out. The engine and the creditor call it.

The pool is [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]; a slot is
block_id * block_size + offset. Slots beyond a sequence's kv_len are never read.
"""

from typing import Protocol

from torch import Tensor

from kernels.partial import AttentionPartial, PagedRows


class Kernels(Protocol):
    """Every method raises ValueError where shapes, dtypes or indices do not fit together.

    Implementations hold no state that a call changes: threads may call one object concurrently.
    """

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k and v [rows, num_kv_heads, head_dim] into slots (int64 [rows])."""
        ...

    def micro_attention(
        self, q: Tensor, pool: Tensor, layer: int, rows: PagedRows, out: AttentionPartial
    ) -> None:
        """Attend q [rows, num_heads, head_dim], already scaled, over paged parts (equation 2).

        Writes every row of out.
        """
        ...

    def merge_rows(self, into: AttentionPartial, row_ids: Tensor, other: AttentionPartial) -> None:
        """into[row_ids] = into[row_ids] (+) other, in place (equation 3); ids int64, distinct."""
        ...

    def finalize(self, partial: AttentionPartial, out: Tensor) -> None:
        """out [rows, num_heads * head_dim] = acc / sum; zero where the part is empty."""
        ...
