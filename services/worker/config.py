"""Settings of one worker, from INFINITE_LLM_<FIELD>. Read once in `__main__`."""

from dataclasses import dataclass
from typing import Literal

from services.common.errors import ConfigError
from services.common.lendable import KEEP_FREE_BLOCKS


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes in tokens or blocks, times in seconds."""

    inst_id: int
    model: str
    """A local folder, the built-in name, or a hub id."""
    listen_address: str = "127.0.0.1:7100"
    advertise_address: str = ""
    """Where others reach `listen_address`; empty means the same."""
    data_address: str = "tcp:127.0.0.1:7101"
    advertise_data_address: str = ""
    """Where others reach `data_address`; empty means the same."""
    data_tls_certificate: str = ""
    """PEM files for data addresses "tls:host:port", read anew for each connection: who we are, the
    key to that, and the authority that vouches for all others. Set all three or none."""
    data_tls_key: str = ""
    data_tls_ca: str = ""
    gmanager_address: str = "127.0.0.1:7000"
    """Of the gManager, or of all of them, separated by commas."""
    model_name: str = ""
    """The name clients use; empty means `model`'s last path component."""
    node: str = ""
    """The machine this instance runs on; empty means the host's name."""
    num_blocks: int = 1024
    block_size: int = 16
    dtype: Literal["float32", "float16", "bfloat16", "quantized"] = "float32"
    """Of the weights. bfloat16 also rounds what is multiplied with them, where a CPU has AMX.
    quantized keeps in memory what a GGUF file has in Q4_1 or Q8_0, and multiplies as bfloat16."""
    kv_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    device: Literal["cpu"] = "cpu"
    num_threads: int = 1
    cores: str = ""
    """The CPUs, as "0,1", that all threads keep to; empty means any. Else, where instances share a
    machine, the kernel likes to wake a creditor on the core of the owner that asks it."""
    max_batched_tokens: int = 256
    """The token budget of one step, prefill and decode together."""
    max_running: int = 64
    max_waiting: int = 256
    prefix_caching: bool = True
    """Requests that begin with the same tokens share the blocks of their beginning."""
    keep_remote_prefix_s: float = 1.0
    """How long a prefix that lies on a creditor outlives its last user: it is memory that the
    creditor cannot use meanwhile."""
    pooling: bool = True
    """False: never lend, never borrow."""
    lend_keep_free: int = KEEP_FREE_BLOCKS
    """Blocks that are never lent, so that own requests can start."""
    max_lent_share: float = 1.0
    """No more of the blocks are lent at once."""
    move_tokens_per_step: int = 16
    """Of planned moves, so that decoding does not slow; urgent ones go as fast as they can."""
    lease_s: float = 10.0
    """How long a reservation or a lent block lives without being used or renewed."""
    attention_deadline_s: float = 5.0
    """A creditor that has not answered an attention call by then has lost the part."""
    stall_timeout_s: float = 15.0
    """The last resort: a running request that gets no memory for this long gives up what it has and
    waits. Longer than a lease, so that what a lost instance held is free before."""
    queue_timeout_s: float = 60.0
    lend_hold_off_s: float = 5.0
    """After lent blocks were called back, nothing is lent for this long."""
    drain_timeout_s: float = 30.0
    """After SIGTERM or `Drain`, running requests may finish and others may take back what they have
    here for this long."""
    poison_freed_blocks: bool = False
    """Fill blocks with NaN as they become free: reading one then shows in every token."""
    metrics_port: int = 0
    otlp_endpoint: str = ""
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, name, "at least 1")
        for name in _ABOVE_ZERO:
            _require(getattr(self, name) > 0, name, "above 0")
        is_power_of_two = self.block_size & (self.block_size - 1) == 0
        _require(self.block_size >= 16 and is_power_of_two, "block_size", "16, 32, 64, ...")
        _require(self.inst_id >= 0, "inst_id", "0 or more")
        _require(0 <= self.metrics_port <= 65535, "metrics_port", "from 0 to 65535")
        _require(0 <= self.lend_keep_free < self.num_blocks, "lend_keep_free", "below NUM_BLOCKS")
        _require(0 <= self.max_lent_share <= 1, "max_lent_share", "from 0 to 1")
        _require(bool(self.model), "model", "the name of a model")
        tls = [getattr(self, name) for name in _TLS_FILES]
        for name in _TLS_FILES:
            is_together = bool(getattr(self, name)) == any(tls)
            _require(is_together, name, "set together with the other DATA_TLS_ settings")
        is_list = all(core.isdecimal() for core in self.cores.split(",")) or not self.cores
        _require(is_list, "cores", "numbers separated by commas")
        for name in ("listen_address", "data_address"):
            advertised = f"advertise_{name.removeprefix('listen_')}"
            is_reachable = bool(getattr(self, advertised)) or not _is_wildcard(getattr(self, name))
            _require(is_reachable, advertised, f"set where {name.upper()} is a wildcard")

    @property
    def core_numbers(self) -> frozenset[int]:
        return frozenset(map(int, filter(None, self.cores.split(","))))

    @property
    def max_lent_blocks(self) -> int:
        return int(self.max_lent_share * self.num_blocks)


_TLS_FILES = ("data_tls_certificate", "data_tls_key", "data_tls_ca")
_AT_LEAST_ONE = (
    "num_blocks",
    "num_threads",
    "max_batched_tokens",
    "max_running",
    "max_waiting",
    "move_tokens_per_step",
)
_ABOVE_ZERO = (
    "lease_s",
    "attention_deadline_s",
    "stall_timeout_s",
    "queue_timeout_s",
    "drain_timeout_s",
)


def _is_wildcard(address: str) -> bool:
    """Peers that were told to connect there would connect to themselves."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0]
    for scheme in ("tcp:", "tls:", "nixl:"):
        host = host.removeprefix(scheme)
    return host in ("0.0.0.0", "::", "[::]", "")


def _require(is_met: bool, name: str, wanted: str) -> None:
    if not is_met:
        raise ConfigError(f"INFINITE_LLM_{name.upper()} must be {wanted}")
