"""Which blocks of this instance are free, shared or cached. Pure; the bytes are in `storage`.

A block that nobody holds any more keeps its content for as long as nobody needs the memory: its
hash finds it again. Such cached blocks count as free, and the least recently used goes first.

Called by the engine thread (own sequences) and by the lender's threads (blocks for other owners),
hence the lock: between asking and taking, another thread may have taken. `try_allocate` is
therefore one indivisible step, without a separate question whose answer could go stale.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from services.worker.kvcache.block_hash import BlockHash


class BlockPool:
    """A fixed number of blocks, by id."""

    def __init__(
        self, num_blocks: int, on_free: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        """`on_free` sees blocks whose content is given up, before anybody can have them again."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_free = on_free
        self._lock = threading.Lock()
        # Taken from the front: blocks without content first, then the least recently used.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be had, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        with self._lock:
            return sum(block_id in self._free for block_id in self._hash_of)

    def try_allocate(self, num_blocks: int, keep_free: int = 0) -> list[int] | None:
        """Take `num_blocks` blocks, or none (None) if fewer than `keep_free` would stay free."""
        with self._lock:
            if num_blocks < 0 or num_blocks + keep_free > len(self._free):
                return None
            return [self._take_least_useful() for _ in range(num_blocks)]

    def reuse(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Hold the blocks of the longest known prefix of `hashes`; maybe none."""
        with self._lock:
            found = []
            for block_hash in hashes:
                block_id = self._block_of.get(block_hash)
                if block_id is None:
                    break
                self._holders[block_id] += 1
                self._free.pop(block_id, None)
                found.append(block_id)
            return found

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold blocks once more that are held already."""
        with self._lock:
            for block_id in block_ids:
                if self._holders[block_id] == 0:
                    raise ValueError(f"block {block_id} is free and cannot be shared")
                self._holders[block_id] += 1

    def num_known(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks `reuse` would find; a hint, since the answer may go stale."""
        with self._lock:
            for count, block_hash in enumerate(hashes):
                if block_hash not in self._block_of:
                    return count
            return len(hashes)

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks of the known prefix somebody holds: sharing them takes no memory."""
        with self._lock:
            count = 0
            for block_hash in hashes:
                block_id = self._block_of.get(block_hash)
                if block_id is None:
                    break
                count += self._holders[block_id] > 0
            return count

    def name(self, block_id: int, block_hash: BlockHash) -> None:
        """A held block is full now and can be found by its hash. The first of equals keeps it."""
        with self._lock:
            if self._holders[block_id] == 0:
                raise ValueError(f"block {block_id} is free and has no content to name")
            if block_hash not in self._block_of and block_id not in self._hash_of:
                self._hash_of[block_id] = block_hash
                self._block_of[block_hash] = block_id

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of blocks. One that nobody holds is a bookkeeping error: ValueError."""
        with self._lock:
            # The last block of a prefix goes first: without its predecessors it is of no use.
            for block_id in reversed(block_ids):
                if self._holders[block_id] == 0:
                    raise ValueError(f"block {block_id} is already free")
                self._holders[block_id] -= 1
                if self._holders[block_id] == 0:
                    self._give_back(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all books tell the same story."""
        with self._lock:
            free = {block_id for block_id, holders in enumerate(self._holders) if holders == 0}
            if set(self._free) != free or min(self._holders) < 0:
                raise AssertionError("free list and holders disagree")
            if {h: b for b, h in self._hash_of.items()} != self._block_of:
                raise AssertionError("hashes and blocks disagree")

    def _give_back(self, block_id: int) -> None:
        self._free[block_id] = None
        if block_id not in self._hash_of:
            self._forget_content(block_id)
            self._free.move_to_end(block_id, last=False)

    def _take_least_useful(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self._forget_content(block_id)
        self._holders[block_id] = 1
        return block_id

    def _forget_content(self, block_id: int) -> None:
        if self._on_free is not None:
            self._on_free([block_id])
