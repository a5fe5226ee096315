"""The worker's settings that a resource names, and what they are where it names none."""

from typing import Any, NamedTuple


class Setting(NamedTuple):
    variable: str
    """The worker's variable, without INFINITE_LLM_."""
    default: Any


SETTINGS = {
    "engine": {
        "kvBlocks": Setting("NUM_BLOCKS", 1024),
        "blockSize": Setting("BLOCK_SIZE", 16),
        "dtype": Setting("DTYPE", "float32"),
        "kvDtype": Setting("KV_DTYPE", "float32"),
        "threads": Setting("NUM_THREADS", 1),
        "maxBatchedTokens": Setting("MAX_BATCHED_TOKENS", 256),
        "maxRunning": Setting("MAX_RUNNING", 64),
        "maxWaiting": Setting("MAX_WAITING", 256),
        "prefixCaching": Setting("PREFIX_CACHING", True),
    },
    "pooling": {
        "enabled": Setting("POOLING", True),
        "lendKeepFree": Setting("LEND_KEEP_FREE", 1),
        "maxLentShare": Setting("MAX_LENT_SHARE", 1),
        "moveTokensPerStep": Setting("MOVE_TOKENS_PER_STEP", 16),
        "leaseSeconds": Setting("LEASE_S", 10),
    },
}
