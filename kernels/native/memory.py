"""Memory for weights on huge pages, so that a step's read of all of them is one long stream."""

import ctypes
import mmap

_CHUNK_BYTES = 256 << 20
_ALIGNMENT = 64


class Arena:
    """Hands out memory that lives as long as the arena; what is not touched costs nothing."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._next = 0
        self._end = 0

    def take(self, num_bytes: int) -> int:
        """The address of new memory, full of zeros."""
        num_bytes += -num_bytes % _ALIGNMENT
        if self._next + num_bytes > self._end:
            self._add_chunk(max(num_bytes, _CHUNK_BYTES))
        address, self._next = self._next, self._next + num_bytes
        return address

    def _add_chunk(self, num_bytes: int) -> None:
        chunk = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            chunk.madvise(mmap.MADV_HUGEPAGE)
        self._chunks.append(chunk)
        self._next = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
        self._end = self._next + num_bytes
