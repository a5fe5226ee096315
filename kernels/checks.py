"""The checks that every implementation of the kernels makes before it touches memory.

They look at shapes, dtypes and layout only, so that they cost nothing on any device.
"""

import torch
from torch import Tensor

from kernels.partial import AttentionPartial, PagedRows

POOL_DIMS = 6
POOL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def check_write(pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    check_pool(pool, layer)
    shape = (slots.shape[0], pool.shape[3], pool.shape[5])
    check_tensor("k", k, shape)
    check_tensor("v", v, shape)
    check_tensor("slots", slots, shape[:1], torch.int64)


def check_attention(
    q: Tensor, pool: Tensor, layer: int, rows: PagedRows, out: AttentionPartial
) -> None:
    check_pool(pool, layer)
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    if q.dim() != 3 or q.shape[2] != head_dim:
        raise ValueError(f"q must be [rows, num_heads, {head_dim}], not {tuple(q.shape)}")
    if q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads over {num_kv_heads} KV heads")
    check_tensor("q", q, tuple(q.shape))
    check_partial("out", out, tuple(q.shape))
    num_seqs = (rows.num_seqs,)
    check_tensor("kv_len", rows.kv_len, num_seqs, torch.int32)
    check_tensor("row_start", rows.row_start, (rows.num_seqs + 1,), torch.int32)
    check_tensor("table_start", rows.table_start, (rows.num_seqs + 1,), torch.int32)
    check_tensor("block_ids", rows.block_ids, tuple(rows.block_ids.shape), torch.int32)


def check_merge(into: AttentionPartial, row_ids: Tensor, other: AttentionPartial) -> None:
    check_partial("into", into, tuple(into.acc.shape))
    check_partial("other", other, (row_ids.shape[0], *into.acc.shape[1:]))
    check_tensor("row_ids", row_ids, tuple(row_ids.shape), torch.int64)


def check_finalize(partial: AttentionPartial, out: Tensor) -> None:
    check_partial("partial", partial, tuple(partial.acc.shape))
    rows, heads, dim = partial.acc.shape
    check_tensor("out", out, (rows, heads * dim))


def check_pool(pool: Tensor, layer: int) -> None:
    if pool.dim() != POOL_DIMS or pool.shape[2] != 2 or not pool.is_contiguous():
        raise ValueError(
            "pool must be contiguous [num_blocks, num_layers, 2, num_kv_heads, block_size, "
            f"head_dim], not {tuple(pool.shape)}"
        )
    if pool.dtype not in POOL_DTYPES:
        raise ValueError(f"pool must be float32, float16 or bfloat16, not {pool.dtype}")
    if not 0 <= layer < pool.shape[1]:
        raise ValueError(f"layer {layer} of a pool of {pool.shape[1]} layers")


def check_partial(name: str, partial: AttentionPartial, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ValueError(f"{name}.acc must be [rows, num_heads, head_dim], not {shape}")
    check_tensor(f"{name}.acc", partial.acc, shape)
    check_tensor(f"{name}.max", partial.max, shape[:2])
    check_tensor(f"{name}.sum", partial.sum, shape[:2])


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)}, "
            f"not {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        )
