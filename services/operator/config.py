"""Settings of the operator, from INFINITE_LLM_<FIELD>. Read once in `__main__`."""

from dataclasses import dataclass

from services.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    namespace: str = "default"
    """Where the operator itself runs, and its Lease lies."""
    pod_name: str = ""
    """Who holds the Lease; empty means the host's name."""
    watch_namespaces: str = ""
    """Separated by commas; empty means all of the cluster."""
    resync_s: float = 15.0
    """Everything is looked at so often, whatever watches have told."""
    lease_name: str = "infinite-llm-operator"
    lease_s: float = 15.0
    """Another operator takes over when this one has been silent for so long."""
    listen_host: str = "0.0.0.0"
    """Of the two ports below."""
    health_port: int = 8080
    """/healthz and /readyz; 0 serves none."""
    metrics_port: int = 0
    log_level: str = "info"

    def __post_init__(self) -> None:
        _require(bool(self.namespace), "namespace", "the name of a namespace")
        _require(bool(self.lease_name), "lease_name", "the name of a Lease")
        _require(self.resync_s > 0, "resync_s", "above 0")
        _require(self.lease_s >= 3, "lease_s", "at least 3")
        for name in ("health_port", "metrics_port"):
            _require(0 <= getattr(self, name) <= 65535, name, "from 0 to 65535")

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Empty: all."""
        return tuple(filter(None, map(str.strip, self.watch_namespaces.split(","))))


def _require(is_met: bool, name: str, wanted: str) -> None:
    if not is_met:
        raise ConfigError(f"INFINITE_LLM_{name.upper()} must be {wanted}")
