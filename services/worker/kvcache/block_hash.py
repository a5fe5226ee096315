"""Names the content of full blocks, so that equal prefixes are found again. Pure.

A block's hash covers its tokens and, through its predecessor's hash, everything before them: equal
hashes mean equal KV. The digest is the same in every process and after every restart. A salt at the
root keeps the prefixes of tenants apart who must not learn of each other by timing.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

_DIGEST_BYTES = 16


def root_hash(salt: str = "") -> BlockHash:
    """What precedes the first block."""
    return BlockHash(blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest())


def extend_hashes(
    hashes: list[BlockHash],
    root: BlockHash,
    token_ids: Sequence[int],
    num_tokens: int,
    block_size: int,
) -> None:
    """Append the hashes of the full blocks of `token_ids[:num_tokens]` that are not there yet."""
    for start in range(len(hashes) * block_size, num_tokens - block_size + 1, block_size):
        content = array("I", token_ids[start : start + block_size]).tobytes()
        previous = hashes[-1] if hashes else root
        hashes.append(BlockHash(blake2b(previous + content, digest_size=_DIGEST_BYTES).digest()))
