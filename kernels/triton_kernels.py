"""The kernels for GPUs, in Triton; the same source runs under Triton's interpreter on a CPU.

MicroAttention runs one program per (tile of query rows, KV head, split of the context); the splits
are merged by the merge kernel. Nothing here waits for the GPU: block ids are checked where
`PagedRows` is built.
"""
# Triton's decorator is untyped, and it gives annotations of its functions a meaning of its own.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_attention, check_finalize, check_merge, check_write
from kernels.partial import AttentionPartial, PagedRows

CHUNK = 64  # slots per step of a program
DECODE_VECTORS, PREFILL_VECTORS = 16, 64  # query vectors per program; tl.dot needs 16
PREFILL_ROWS = 8  # mean rows per sequence from which the larger tile pays
MAX_SPLITS = 32


@triton.jit
def _find_seq(row_start, num_seqs, tile, TILE_ROWS: tl.constexpr):
    """The sequence of a tile, where sequence i owns tiles row_start[i] // TILE_ROWS + i and up."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(row_start + middle) // TILE_ROWS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend_chunk(
    acc, maximum, total, queries, visible, kv, table, start, end, kv_head,
    head_dim, block_size, block_stride, plane_size,
    DIM: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, over the slots start..min(start + STEP, end)."""
    dim = tl.arange(0, DIM)
    slot = start + tl.arange(0, STEP)
    is_slot = slot < end
    block = tl.load(table + slot // block_size, mask=is_slot, other=0).to(tl.int64)
    offset = block * block_stride + (kv_head * block_size + slot % block_size) * head_dim
    is_kv = is_slot[:, None] & (dim < head_dim)[None, :]
    keys = tl.load(kv + offset[:, None] + dim[None, :], mask=is_kv, other=0.0)
    values = tl.load(kv + plane_size + offset[:, None] + dim[None, :], mask=is_kv, other=0.0)
    # Storage types are cast first: a bfloat16 dot is wrong under the interpreter.
    scores = tl.dot(queries, tl.trans(keys.to(tl.float32)), input_precision=PRECISION)
    is_seen = is_slot[None, :] & (slot[None, :] < visible[:, None])
    scores = tl.where(is_seen, scores, float("-inf"))
    next_maximum = tl.maximum(maximum, tl.max(scores, 1))
    base = tl.where(next_maximum == float("-inf"), 0.0, next_maximum)
    weights = tl.exp(scores - base[:, None])
    scale = tl.exp(maximum - base)
    total = total * scale + tl.sum(weights, 1)
    acc = acc * scale[:, None]
    acc += tl.dot(weights, values.to(tl.float32), input_precision=PRECISION)
    return acc, next_maximum, total


@triton.jit
def _attend(
    q, kv, acc_out, max_out, sum_out,
    row_start, table_start, block_ids, kv_len,
    num_seqs, num_rows, num_heads, head_dim, block_size, block_stride, plane_size,
    IS_CAUSAL: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr, VECTORS: tl.constexpr,
    DIM: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = _find_seq(row_start, num_seqs, tile, TILE_ROWS)
    seq_row, seq_end = tl.load(row_start + seq), tl.load(row_start + seq + 1)
    tile_row = (tile - (seq_row // TILE_ROWS + seq)) * TILE_ROWS
    rows_in_seq = seq_end - seq_row
    if tile_row >= rows_in_seq:
        return
    vector = tl.arange(0, VECTORS)
    row = tile_row + vector // GROUP
    is_row = (vector < TILE_ROWS * GROUP) & (row < rows_in_seq)
    length = tl.load(kv_len + seq)
    visible = tl.full([VECTORS], 0, tl.int32) + length
    last_visible = length
    if IS_CAUSAL:
        visible = length - (rows_in_seq - 1 - row)
        last_row = tl.minimum(tile_row + TILE_ROWS, rows_in_seq) - 1
        last_visible = length - (rows_in_seq - 1 - last_row)

    dim = tl.arange(0, DIM)
    is_dim = dim < head_dim
    head = (seq_row + row).to(tl.int64) * num_heads + kv_head * GROUP + vector % GROUP
    at = head[:, None] * head_dim + dim[None, :]
    is_at = is_row[:, None] & is_dim[None, :]
    queries = tl.load(q + at, mask=is_at, other=0.0)
    maximum = tl.full([VECTORS], float("-inf"), tl.float32)
    total = tl.zeros([VECTORS], tl.float32)
    acc = tl.zeros([VECTORS, DIM], tl.float32)

    num_steps = tl.cdiv(tl.maximum(last_visible, 0), STEP)
    steps_per_split = tl.cdiv(num_steps, tl.num_programs(2))
    begin = split * steps_per_split * STEP
    end = tl.minimum(begin + steps_per_split * STEP, last_visible)
    table = block_ids + tl.load(table_start + seq)
    for start in range(begin, end, STEP):
        acc, maximum, total = _attend_chunk(
            acc, maximum, total, queries, visible, kv, table, start, end, kv_head,
            head_dim, block_size, block_stride, plane_size, DIM, STEP, PRECISION,
        )  # fmt: skip

    out = split.to(tl.int64) * num_rows * num_heads + head
    tl.store(acc_out + out[:, None] * head_dim + dim[None, :], acc, mask=is_at)
    tl.store(max_out + out, maximum, mask=is_row)
    tl.store(sum_out + out, total, mask=is_row)


@triton.jit
def _merge(
    acc, max, sum, row_ids, other_acc, other_max, other_sum, num_parts, part_size,
    num_heads, head_dim, HAS_ROW_IDS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    into = row * num_heads + head
    other = into
    if HAS_ROW_IDS:
        into = tl.load(row_ids + row) * num_heads + head
    dim = tl.arange(0, DIM)
    is_dim = dim < head_dim
    merged = tl.load(acc + into * head_dim + dim, mask=is_dim, other=0.0)
    maximum, total = tl.load(max + into), tl.load(sum + into)
    for _ in range(num_parts):
        part = tl.load(other_acc + other * head_dim + dim, mask=is_dim, other=0.0)
        part_max, part_sum = tl.load(other_max + other), tl.load(other_sum + other)
        next_maximum = tl.maximum(maximum, part_max)
        base = tl.where(next_maximum == float("-inf"), 0.0, next_maximum)
        mine, theirs = tl.exp(maximum - base), tl.exp(part_max - base)
        merged = merged * mine + part * theirs
        total = total * mine + part_sum * theirs
        maximum = next_maximum
        other += part_size
    tl.store(acc + into * head_dim + dim, merged, mask=is_dim)
    tl.store(max + into, maximum)
    tl.store(sum + into, total)


@triton.jit
def _write(
    kv, rows, slots, num_kv_heads, head_dim, block_size, block_stride, num_slots,
    DIM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, DIM)
    slot = tl.load(slots + row)
    is_dim = dim < tl.where((slot >= 0) & (slot < num_slots), head_dim, 0)
    values = tl.load(rows + (row * num_kv_heads + head) * head_dim + dim, mask=is_dim, other=0.0)
    offset = (head * block_size + slot % block_size) * head_dim
    to = kv + slot // block_size * block_stride + offset + dim
    tl.store(to, values.to(kv.dtype.element_ty), mask=is_dim)


class TritonKernels:
    def __init__(self, num_programs: int) -> None:
        """num_programs: how many it takes to fill the GPU; a few for each multiprocessor."""
        self._num_programs = num_programs

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        check_write(pool, layer, k, v, slots)
        num_blocks, _, _, num_kv_heads, block_size, head_dim = pool.shape
        if slots.shape[0] == 0:
            return
        for plane, rows in enumerate((k, v)):
            _write[(slots.shape[0], num_kv_heads)](
                pool[:, layer, plane], rows, slots, num_kv_heads, head_dim, block_size,
                pool.stride(0), num_blocks * block_size, DIM=triton.next_power_of_2(head_dim),
            )  # fmt: skip

    def micro_attention(
        self, q: Tensor, pool: Tensor, layer: int, rows: PagedRows, out: AttentionPartial
    ) -> None:
        check_attention(q, pool, layer, rows, out)
        num_rows, num_heads, head_dim = q.shape
        if num_rows == 0:
            return
        num_kv_heads, block_size = pool.shape[3], pool.shape[4]
        group = num_heads // num_kv_heads
        is_prefill = num_rows >= PREFILL_ROWS * rows.num_seqs
        vectors = PREFILL_VECTORS if is_prefill else DECODE_VECTORS
        vectors = max(vectors, triton.next_power_of_2(group))
        tile_rows = vectors // group
        num_tiles = num_rows // tile_rows + rows.num_seqs
        num_splits = min(MAX_SPLITS, max(1, self._num_programs // (num_tiles * num_kv_heads)))
        parts = out
        if num_splits > 1:
            parts = AttentionPartial.allocate(num_splits * num_rows, num_heads, head_dim, q.device)
        _attend[(num_tiles, num_kv_heads, num_splits)](
            q, pool[:, layer], parts.acc, parts.max, parts.sum,
            rows.row_start, rows.table_start, rows.block_ids, rows.kv_len,
            rows.num_seqs, num_rows, num_heads, head_dim, block_size, pool.stride(0),
            pool.stride(2), IS_CAUSAL=rows.causal, GROUP=group, TILE_ROWS=tile_rows,
            VECTORS=vectors, DIM=max(16, triton.next_power_of_2(head_dim)), STEP=CHUNK,
            # 16-bit K and V are exact in tf32; only float32 ones need the slow exact product.
            PRECISION="ieee" if pool.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        if num_splits > 1:
            _fill_neutral(out)
            _launch_merge(out, None, parts, num_splits)

    def merge_rows(self, into: AttentionPartial, row_ids: Tensor, other: AttentionPartial) -> None:
        check_merge(into, row_ids, other)
        if row_ids.shape[0]:
            _launch_merge(into, row_ids, other, num_parts=1)

    def finalize(self, partial: AttentionPartial, out: Tensor) -> None:
        check_finalize(partial, out)
        total = torch.where(partial.sum == 0, 1.0, partial.sum)
        torch.div(partial.acc, total[..., None], out=out.view(partial.acc.shape))


def _fill_neutral(partial: AttentionPartial) -> None:
    partial.acc.zero_()
    partial.max.fill_(-torch.inf)
    partial.sum.zero_()


def _launch_merge(
    into: AttentionPartial, row_ids: Tensor | None, other: AttentionPartial, num_parts: int
) -> None:
    num_rows = other.num_rows // num_parts
    _, num_heads, head_dim = into.acc.shape
    _merge[(num_rows, num_heads)](
        into.acc, into.max, into.sum, row_ids, other.acc, other.max, other.sum,
        num_parts, num_rows * num_heads, num_heads, head_dim,
        HAS_ROW_IDS=row_ids is not None, DIM=triton.next_power_of_2(head_dim),
    )  # fmt: skip
