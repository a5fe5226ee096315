"""`python -m benchmarks.attention`: decode attention over a paged KVCache, beside a read stream.

One query row per sequence, blocks in random order, as much KVCache as no cache of the CPU holds.
The ratio is of times: reading the float32 KVCache once over attending to it in each type.
"""

import random
import sys
import time

import torch

import kernels
from benchmarks.bandwidth import read_bytes_per_s
from benchmarks.command import new_parser, run
from benchmarks.report import Report
from kernels import AttentionPartial, Kernels, PagedRows
from services.worker.kvcache.storage import KvShape, KvStorage

_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 9, 3, 64, 16
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Batch and context.
_SHAPES = ((1, 2048), (8, 512), (8, 2048), (8, 8192))
_CACHE_BYTES = 1 << 30


def attention_s(
    chosen: Kernels, batch: int, context: int, dtype: torch.dtype, passes: int
) -> float:
    """The fastest pass over all layers of a KVCache, per layer."""
    per_seq = -(-context // _BLOCK_SIZE)
    layer = KvShape(1, _NUM_KV_HEADS, _BLOCK_SIZE, _HEAD_DIM, dtype)
    num_layers = max(2, _CACHE_BYTES // (batch * per_seq * layer.block_bytes))
    shape = KvShape(min(30, num_layers), _NUM_KV_HEADS, _BLOCK_SIZE, _HEAD_DIM, dtype)
    storage = KvStorage(batch * per_seq, shape)
    storage.pool.fill_(0.25)
    block_ids = list(range(batch * per_seq))
    random.Random(0).shuffle(block_ids)
    rows = PagedRows.build(
        [1] * batch,
        [block_ids[i * per_seq : (i + 1) * per_seq] for i in range(batch)],
        [context] * batch,
        causal=True, num_blocks=storage.num_blocks, block_size=_BLOCK_SIZE,
    )  # fmt: skip
    query = torch.ones(batch, _NUM_HEADS, _HEAD_DIM) / _HEAD_DIM
    out = AttentionPartial.allocate(*query.shape)
    times = []
    for _ in range(passes):
        started = time.perf_counter()
        for index in range(shape.num_layers):
            chosen.micro_attention(query, storage.pool, index, rows, out)
        times.append((time.perf_counter() - started) / shape.num_layers)
    return min(times)


def kv_bytes(batch: int, context: int, dtype: torch.dtype) -> int:
    return batch * context * _NUM_KV_HEADS * _HEAD_DIM * 2 * dtype.itemsize


def main(arguments: list[str]) -> None:
    options, report = new_parser("attention", __doc__).parse_args(arguments), Report()
    report.machine(options.threads)
    rate = read_bytes_per_s(options.threads)
    chosen = kernels.select("cpu", options.threads)
    shares: dict[str, dict[str, float]] = {}
    rows = []
    for batch, context in _SHAPES[-1:] if options.quick else _SHAPES:
        read_s = kv_bytes(batch, context, torch.float32) / rate
        name, cells = f"{batch} x {context}", []
        for dtype in _DTYPES:
            seconds = attention_s(chosen, batch, context, dtype, passes=5)
            share = read_s / seconds
            shares.setdefault(str(dtype).removeprefix("torch."), {})[name] = round(share, 3)
            cells.append(f"{kv_bytes(batch, context, dtype) / seconds / 1e9:.1f} {share:5.0%}")
        rows.append((name, *cells))
    report.table(
        "Decode attention: GB/s, and speed beside a float32 read stream",
        ("batch x context", *shares),
        rows,
    )
    report.last_line({"read_gb_per_s": round(rate / 1e9, 2), "speed_over_float32_read": shares})


if __name__ == "__main__":
    sys.exit(run(main))
