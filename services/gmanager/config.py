"""Settings of the gManager, from the variables `INFINITE_LLM_<FIELD>`; read by `__main__`."""

from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError

#: Redis gets a quarter of the lease to answer.
MIN_LEASE_S = 0.5


@dataclass(frozen=True, slots=True)
class GManagerConfig:
    #: Where the GManager service listens.
    listen_address: str = "127.0.0.1:7000"
    #: Where others reach `listen_address`; empty means the same.
    advertise_address: str = ""
    #: Where the map is kept for a warm restart: redis://, rediss:// (TLS) or unix://.
    redis_url: str = "redis://127.0.0.1:6379/0"
    #: The certificates that may sign that of a rediss:// server; none means the system's.
    redis_ca_file: Path | None = None
    #: Holds the password, for those who would rather not put it into the URL.
    redis_password_file: Path | None = None
    #: Above 0: this is one of several gManagers, and leads while it holds a lease of this length
    #: in Redis. With 0 it is the only one.
    leader_lease_s: float = 0.0
    planning_period_s: float = 1.0
    #: How often workers report; told to them when they register.
    heartbeat_period_s: float = 0.5
    #: An instance that is silent for longer is taken off the map.
    instance_timeout_s: float = 3.0
    #: beta_thres of Algorithm 1: an instance with a larger batch is no debtor.
    batch_threshold: int = 8
    #: U_thres of Algorithm 1: the share of its memory up to which an instance lends.
    utilisation_threshold: float = 0.8
    #: A move must raise the throughput of those who take part by more than this share of it.
    min_gain: float = 0.01
    #: A source is left alone for so long after a move, whatever came of it.
    cool_down_s: float = 5.0
    #: Moves that are under way at once from one instance, and to one.
    max_moves_per_source: int = 4
    max_moves_per_destination: int = 4
    #: What a link between nodes is at best; within one, instances measure it themselves.
    other_node_round_trip_s: float = 0.0001
    other_node_bytes_per_s: float = 1.25e9
    #: Plans and records, but moves nothing.
    planner_dry_run: bool = False
    #: False plans nothing and names no creditors: every instance on its own.
    pooling: bool = True
    #: Port of the Prometheus endpoint; 0 serves none.
    metrics_port: int = 0
    #: Where spans go; empty keeps them nowhere.
    otlp_endpoint: str = ""
    log_level: str = "info"

    def __post_init__(self) -> None:
        _require(self.planning_period_s > 0, "PLANNING_PERIOD_S", "above 0")
        _require(self.heartbeat_period_s > 0, "HEARTBEAT_PERIOD_S", "above 0")
        _require(
            self.instance_timeout_s > self.heartbeat_period_s,
            "INSTANCE_TIMEOUT_S",
            "above the heartbeat period",
        )
        is_lease = self.leader_lease_s == 0 or self.leader_lease_s >= MIN_LEASE_S
        _require(is_lease, "LEADER_LEASE_S", f"0 or at least {MIN_LEASE_S}")
        _require(self.batch_threshold >= 0, "BATCH_THRESHOLD", "at least 0")
        _require(0 <= self.utilisation_threshold <= 1, "UTILISATION_THRESHOLD", "from 0 to 1")
        _require(self.min_gain >= 0, "MIN_GAIN", "at least 0")
        _require(self.cool_down_s >= 0, "COOL_DOWN_S", "at least 0")
        for name in ("max_moves_per_source", "max_moves_per_destination"):
            _require(getattr(self, name) >= 1, name.upper(), "at least 1")
        _require(self.other_node_round_trip_s >= 0, "OTHER_NODE_ROUND_TRIP_S", "at least 0")
        _require(self.other_node_bytes_per_s > 0, "OTHER_NODE_BYTES_PER_S", "above 0")
        _require(0 <= self.metrics_port <= 65535, "METRICS_PORT", "from 0 to 65535")


def _require(is_met: bool, name: str, wanted: str) -> None:
    if not is_met:
        raise ConfigError(f"INFINITE_LLM_{name} must be {wanted}")
