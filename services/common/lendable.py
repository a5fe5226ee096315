"""What instances lend each other of their KV memory, and so what one request can have. Pure.

The rule is the router's, which refuses or holds back what cannot fit, and the workers', which lend.
"""

from collections.abc import Iterable

#: Blocks that an instance keeps for itself by default, so that its own requests can start.
KEEP_FREE_BLOCKS = 1


def lendable_blocks(num_blocks: int, keep_free: int = KEEP_FREE_BLOCKS) -> int:
    """Of so many, free now or at all."""
    return max(0, num_blocks - keep_free)


def pooled_tokens(pools: Iterable[tuple[int, int]]) -> int:
    """The longest sequence that instances can hold together, each with (blocks, block size).

    Any of them may own it, and gives it all; the others lend.
    """
    sizes = [(max(0, num_blocks), block_size) for num_blocks, block_size in pools]
    lent = sum(lendable_blocks(num_blocks) * size for num_blocks, size in sizes)
    kept = ((num_blocks - lendable_blocks(num_blocks)) * size for num_blocks, size in sizes)
    return lent + max(kept, default=0)
