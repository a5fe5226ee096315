"""The kernels for CPUs: C++ over the memory of torch tensors, on threads of their own."""

import weakref
from ctypes import byref
from pathlib import Path

from torch import Tensor

from kernels.checks import (
    check_attention,
    check_finalize,
    check_merge,
    check_pool,
    check_write,
)
from kernels.native.build import build_library
from kernels.native.library import FORMATS, Pool, Rows, load_library
from kernels.native.wires import NativePart
from kernels.partial import AttentionPartial, PagedRows
from kernels.wire import Exchanged, WiredPart

MIN_BLOCK_SIZE = 16
MAX_HEAD_DIM = 256


class NativeKernels:
    """Threads may call one object concurrently; its own threads sleep between calls."""

    def __init__(self, num_threads: int, cache_dir: Path) -> None:
        """Builds the library where it is missing; raises BuildError or OSError if that fails."""
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self.library = load_library(build_library(cache_dir))
        self.threads = self.library.start_threads(num_threads)
        # At exit another thread may still be inside a call; the process ends the threads anyway.
        weakref.finalize(self, self.library.stop_threads, self.threads).atexit = False

    def write_kv(self, pool: Tensor, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        check_write(pool, layer, k, v, slots)
        error = self.library.write_kv(
            byref(view_pool(pool)),
            layer,
            k.data_ptr(),
            v.data_ptr(),
            slots.data_ptr(),
            slots.shape[0],
        )
        raise_if(error)

    def micro_attention(
        self, q: Tensor, pool: Tensor, layer: int, rows: PagedRows, out: AttentionPartial
    ) -> None:
        check_attention(q, pool, layer, rows, out)
        error = self.library.micro_attention(
            self.threads,
            byref(view_pool(pool)),
            layer,
            q.data_ptr(),
            q.shape[0],
            q.shape[1],
            byref(view_rows(rows)),
            rows.block_ids.shape[0],
            out.acc.data_ptr(),
            out.max.data_ptr(),
            out.sum.data_ptr(),
        )
        raise_if(error)

    def answer_layers(
        self, part: WiredPart, pool: Tensor, rows: PagedRows, first: int, patience_s: float
    ) -> Exchanged:
        check_pool(pool, first)
        native = NativePart(part, pool.shape[1])
        error = self.library.answer_layers(
            self.threads,
            byref(view_pool(pool)),
            pool.shape[1],
            byref(view_rows(rows)),
            rows.block_ids.shape[0],
            part.query.shape[1],
            byref(native.view),
            first,
            patience_s,
        )
        raise_if(error)
        return native.exchanged(native.view)

    def merge_rows(self, into: AttentionPartial, row_ids: Tensor, other: AttentionPartial) -> None:
        check_merge(into, row_ids, other)
        num_rows, num_heads, head_dim = into.acc.shape
        error = self.library.merge_rows(
            into.acc.data_ptr(),
            into.max.data_ptr(),
            into.sum.data_ptr(),
            num_rows,
            row_ids.data_ptr(),
            row_ids.shape[0],
            other.acc.data_ptr(),
            other.max.data_ptr(),
            other.sum.data_ptr(),
            num_heads,
            head_dim,
        )
        raise_if(error)

    def finalize(self, partial: AttentionPartial, out: Tensor) -> None:
        check_finalize(partial, out)
        num_rows, num_heads, head_dim = partial.acc.shape
        self.library.finalize(
            partial.acc.data_ptr(),
            partial.sum.data_ptr(),
            num_rows * num_heads,
            head_dim,
            out.data_ptr(),
        )


def view_pool(pool: Tensor) -> Pool:
    num_blocks, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    if block_size < MIN_BLOCK_SIZE or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two of at least 16, not {block_size}")
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}, not {head_dim}")
    return Pool(
        pool.data_ptr(),
        num_blocks,
        num_layers,
        num_kv_heads,
        block_size,
        head_dim,
        FORMATS[pool.dtype],
    )


def view_rows(rows: PagedRows) -> Rows:
    return Rows(
        rows.row_start.data_ptr(),
        rows.table_start.data_ptr(),
        rows.block_ids.data_ptr(),
        rows.kv_len.data_ptr(),
        rows.num_seqs,
        rows.causal,
    )


def raise_if(error: bytes | None) -> None:
    if error is not None:
        raise ValueError(error.decode())
