"""The checks that every implementation of the kernels makes before it touches memory.

They look at shapes, dtypes and layout only, so that they cost little on any device; `PagedRows`
and `AttentionPartial` checked themselves when they were made.
"""

import torch
from torch import Tensor

from kernels.partial import AttentionPartial, PagedRows, check_tensor

POOL_DIMS = 6
POOL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def check_write(pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    check_pool(pool, layer)
    shape = torch.Size((slots.numel(), pool.shape[3], pool.shape[5]))
    check_tensor("k", k, torch.float32, shape)
    check_tensor("v", v, torch.float32, shape)
    check_tensor("slots", slots, torch.int64, shape[:1])


def check_attention(
    q: Tensor, pool: Tensor, layer: int, rows: PagedRows, out: AttentionPartial
) -> None:
    check_pool(pool, layer)
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    if q.dim() != 3 or q.shape[2] != head_dim:
        raise ValueError(f"q must be [rows, num_heads, {head_dim}], not {list(q.shape)}")
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads over {num_kv_heads} KV heads")
    check_tensor("q", q, torch.float32)
    if out.acc.shape != q.shape:
        raise ValueError(f"out.acc must be {list(q.shape)}, not {list(out.acc.shape)}")


def check_merge(into: AttentionPartial, row_ids: Tensor, other: AttentionPartial) -> None:
    check_tensor("row_ids", row_ids, torch.int64, other.acc.shape[:1])
    if other.acc.shape[1:] != into.acc.shape[1:]:
        raise ValueError(f"a partial of {list(other.acc.shape)} into one of {list(into.acc.shape)}")


def check_finalize(partial: AttentionPartial, out: Tensor) -> None:
    rows, heads, dim = partial.acc.shape
    check_tensor("out", out, torch.float32, torch.Size((rows, heads * dim)))


def check_pool(pool: Tensor, layer: int) -> None:
    if pool.dim() != POOL_DIMS or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(
            "pool must be contiguous [num_blocks, num_layers, 2, num_kv_heads, block_size, "
            f"head_dim], not {list(pool.shape)}"
        )
    if pool.dtype not in POOL_DTYPES:
        raise ValueError(f"pool must be float32, float16 or bfloat16, not {pool.dtype}")
    if not 0 <= layer < pool.shape[1]:
        raise ValueError(f"layer {layer} of a pool of {pool.shape[1]} layers")
