"""Settings of the gManager, from the variables `INFINITE_LLM_<FIELD>`; read by `__main__`."""

from dataclasses import dataclass

from services.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GManagerConfig:
    #: Where the GManager service listens.
    listen_address: str = "127.0.0.1:7000"
    #: Where the map is kept for a warm restart.
    redis_url: str = "redis://127.0.0.1:6379/0"
    planning_period_s: float = 1.0
    #: How often workers report; told to them when they register.
    heartbeat_period_s: float = 0.5
    #: An instance that is silent for longer is taken off the map.
    instance_timeout_s: float = 3.0
    #: beta_thres of Algorithm 1: an instance with a larger batch is no debtor.
    batch_threshold: int = 8
    #: U_thres of Algorithm 1: the share of its memory up to which an instance lends.
    utilisation_threshold: float = 0.8
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
        _require(self.batch_threshold >= 0, "BATCH_THRESHOLD", "at least 0")
        _require(0 <= self.utilisation_threshold <= 1, "UTILISATION_THRESHOLD", "from 0 to 1")
        _require(0 <= self.metrics_port <= 65535, "METRICS_PORT", "from 0 to 65535")


def _require(is_met: bool, name: str, wanted: str) -> None:
    if not is_met:
        raise ConfigError(f"INFINITE_LLM_{name} must be {wanted}")
