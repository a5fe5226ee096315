"""The rate at which this machine reads memory."""

import mmap
import time
from collections.abc import Callable

import torch

#: Far more than the caches hold, even where one claims hundreds of megabytes.
_BUFFER_BYTES = 2 << 30
_ROW_FLOATS = 1 << 18
_NUM_PASSES = 4


def read_bytes_per_s(num_threads: int, buffer_bytes: int = _BUFFER_BYTES) -> float:
    """The fastest pass of any simple reader over a large buffer on huge pages.

    Several readers, since it is the memory that is wanted, not what one of them makes of it.
    """
    torch.set_num_threads(num_threads)
    memory = mmap.mmap(-1, buffer_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
    rows = buffer.view(-1, min(_ROW_FLOATS, buffer.numel()))
    readers: tuple[Callable[[], object], ...] = (
        buffer.sum,
        lambda: torch.dot(buffer, buffer),
        lambda: torch.mv(rows, rows[0]),
    )
    fastest_s = min(_pass_s(reader) for reader in readers for _ in range(_NUM_PASSES))
    return buffer_bytes / fastest_s


def _pass_s(reader: Callable[[], object]) -> float:
    started = time.perf_counter()
    reader()
    return time.perf_counter() - started
