"""Which blocks of this instance are free. Pure bookkeeping; the bytes are in `storage`.

Called by the engine thread (own sequences) and by the lender's threads (blocks for other owners),
hence the lock: between asking and taking, another thread may have taken. `try_allocate` is
therefore one indivisible step, without a separate question whose answer could go stale.
"""

import threading
from collections.abc import Callable, Sequence


class BlockPool:
    """A fixed number of blocks, by id; the most recently freed first, since its memory is warm."""

    def __init__(
        self, num_blocks: int, on_free: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        """`on_free` sees blocks that go back, before anybody can have them again."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_free = on_free
        self._lock = threading.Lock()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._is_free = [True] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_allocate(self, num_blocks: int, keep_free: int = 0) -> list[int] | None:
        """Take `num_blocks` blocks, or none (None) if fewer than `keep_free` would stay free."""
        with self._lock:
            if num_blocks < 0 or num_blocks + keep_free > len(self._free):
                return None
            taken = [self._free.pop() for _ in range(num_blocks)]
            for block_id in taken:
                self._is_free[block_id] = False
            return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back. A block that is free already is a bookkeeping error: ValueError."""
        with self._lock:
            if self._on_free is not None:
                self._on_free(block_ids)
            for block_id in block_ids:
                if self._is_free[block_id]:
                    raise ValueError(f"block {block_id} is already free")
                self._is_free[block_id] = True
                self._free.append(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free list and the flags tell the same story."""
        with self._lock:
            if len(set(self._free)) != len(self._free) or sum(self._is_free) != len(self._free):
                raise AssertionError("free list and flags disagree")
