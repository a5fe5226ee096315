"""The kernels in plain torch: what the others must equal, and what runs where nothing else can.

Gathers each part into dense tensors, so it is slow; the formulas are the paper's equations 2 and 3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.checks import check_attention, check_finalize, check_merge, check_write
from kernels.partial import AttentionPartial, PagedRows


def attention_reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> AttentionPartial:
    """The partial of q [rows, num_heads, head_dim], scaled, over one dense part.

    k, v: [len, num_kv_heads, head_dim]; row i sees the first visible[i] tokens. The arithmetic has
    the dtype of q; the result is float32.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.to(q.dtype).repeat_interleave(group, dim=1)
    values = v.to(q.dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,thd->rht", q, keys)
    hidden = torch.arange(k.shape[0], device=q.device) >= visible[:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    # A leading -inf column lets amax answer for a part of no tokens at all.
    maximum = torch.nn.functional.pad(scores, (1, 0), value=-torch.inf).amax(dim=-1)
    weights = torch.exp(scores - _finite(maximum)[..., None])
    return AttentionPartial(
        acc=torch.einsum("rht,thd->rhd", weights, values).float().contiguous(),
        max=maximum.float(),
        sum=weights.sum(dim=-1).float(),
    )


def merge(partials: Sequence[AttentionPartial]) -> AttentionPartial:
    """The partial over the union of disjoint parts, in any order (equation 3)."""
    maximum = torch.stack([partial.max for partial in partials]).amax(dim=0)
    scales = [torch.exp(partial.max - _finite(maximum)) for partial in partials]
    pairs = list(zip(scales, partials, strict=True))
    return AttentionPartial(
        acc=torch.stack([scale[..., None] * part.acc for scale, part in pairs]).sum(dim=0),
        max=maximum,
        sum=torch.stack([scale * part.sum for scale, part in pairs]).sum(dim=0),
    )


def _finite(maximum: Tensor) -> Tensor:
    """The maximum to subtract: 0 for an empty part, where -inf - -inf would be NaN."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


class ReferenceKernels:
    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        check_write(pool, layer, k, v, slots)
        block_size = pool.shape[4]
        check_range("slots", slots, pool.shape[0] * block_size)
        blocks, offsets = slots // block_size, slots % block_size
        pool[blocks, layer, 0, :, offsets] = k.to(pool.dtype)
        pool[blocks, layer, 1, :, offsets] = v.to(pool.dtype)

    def micro_attention(
        self, q: Tensor, pool: Tensor, layer: int, rows: PagedRows, out: AttentionPartial
    ) -> None:
        check_attention(q, pool, layer, rows, out)
        rows.validate(pool.shape[0], pool.shape[4])
        row_start, table_start = rows.row_start.tolist(), rows.table_start.tolist()
        if row_start[-1] != q.shape[0]:
            raise ValueError(f"rows name {row_start[-1]} rows, q has {q.shape[0]}")
        for seq, kv_len in enumerate(rows.kv_len.tolist()):
            first, last = row_start[seq], row_start[seq + 1]
            block_ids = rows.block_ids[table_start[seq] : table_start[seq + 1]]
            keys, values = _gather(pool, layer, block_ids, max(kv_len, 0))
            visible = torch.full((last - first,), kv_len, device=q.device)
            if rows.causal:
                visible -= torch.arange(last - first - 1, -1, -1, device=q.device)
            partial = attention_reference(q[first:last], keys, values, visible)
            out.acc[first:last] = partial.acc
            out.max[first:last] = partial.max
            out.sum[first:last] = partial.sum

    def merge_rows(self, into: AttentionPartial, row_ids: Tensor, other: AttentionPartial) -> None:
        check_merge(into, row_ids, other)
        check_range("row_ids", row_ids, into.num_rows)
        mine = AttentionPartial(into.acc[row_ids], into.max[row_ids], into.sum[row_ids])
        merged = merge([mine, other])
        into.acc[row_ids] = merged.acc
        into.max[row_ids] = merged.max
        into.sum[row_ids] = merged.sum

    def finalize(self, partial: AttentionPartial, out: Tensor) -> None:
        check_finalize(partial, out)
        total = torch.where(partial.sum == 0, 1.0, partial.sum)
        torch.div(partial.acc, total[..., None], out=out.view(partial.acc.shape))


def check_range(name: str, ids: Tensor, limit: int) -> None:
    if bool(((ids < 0) | (ids >= limit)).any()):
        raise ValueError(f"{name} must lie in 0..{limit - 1}")


def _gather(pool: Tensor, layer: int, block_ids: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V of the first `length` tokens: [length, num_kv_heads, head_dim] each."""
    blocks = pool[block_ids.long(), layer]
    keys, values = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return keys, values
