"""The router's settings; read once from the environment by `__main__`."""

from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouterConfig:
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    """Zero takes a free port."""
    grpc_port: int = 8001
    gmanager_address: str = "127.0.0.1:7000"
    """Of the gManager, or of all of them, separated by commas."""
    model: str = "smollm2-135m-instruct"
    """A local folder or a name that the model store knows; here only its tokenizer is read."""
    model_name: str = ""
    """The name clients use and workers report; empty means `model`'s last path component."""
    pooling: bool = True
    """False: instances neither lend nor borrow, so a request must fit on one."""
    stream_idle_timeout_s: float = 60.0
    """Longest silence of a worker between two tokens, and of a client that stops reading."""
    keep_alive_s: float = 20.0
    """Longest silence of an HTTP stream; then it carries a comment, that proxies do not cut it."""
    first_token_timeout_s: float = 300.0
    """Longest wait for the first token: the queue and the whole prompt come before it."""
    resume_timeout_s: float = 30.0
    """Longest wait for an instance that can go on with a request whose own was lost."""
    dead_after_s: float = 6.0
    """An instance whose process does not even answer pings is lost after this long."""
    max_concurrent_requests: int = 512
    """Sequences in flight; above it the answer is 429."""
    max_queued_requests: int = 256
    """Sequences that wait for room in the cluster's memory; above it the answer is 429."""
    queue_timeout_s: float = 60.0
    """Longest such wait; then the answer is 429, too."""
    queue_patience_s: float = 5.0
    """One that does not fit lets others pass for this long."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Of one HTTP body or gRPC message."""
    max_open_requests: int = 4096
    """HTTP requests at once, of all routes but the probes; above it the answer is 429."""
    api_keys_file: Path | None = None
    """Keys that are asked for on everything but the probes, made by `services.router.access`;
    reloaded when it changes. None: everybody may come in."""
    tls_certificate: Path | None = None
    """PEM files with which both doors speak TLS, renewed without a restart."""
    tls_key: Path | None = None
    metrics_port: int = 0
    """`/metrics` once more, here without a key; 0: not."""
    shutdown_timeout_s: float = 10.0
    """How long running streams may go on after SIGTERM."""
    otlp_endpoint: str = ""
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in (
            "stream_idle_timeout_s",
            "keep_alive_s",
            "first_token_timeout_s",
            "resume_timeout_s",
            "dead_after_s",
            "max_concurrent_requests",
            "max_queued_requests",
            "queue_timeout_s",
            "queue_patience_s",
            "max_body_bytes",
            "max_open_requests",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"INFINITE_LLM_{name.upper()} must be above 0")
        if self.shutdown_timeout_s < 0:
            raise ConfigError("INFINITE_LLM_SHUTDOWN_TIMEOUT_S must not be negative")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("INFINITE_LLM_TLS_CERTIFICATE and INFINITE_LLM_TLS_KEY go together")
        for name in ("http_port", "grpc_port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"INFINITE_LLM_{name.upper()} must be from 0 to 65535")

    @property
    def served_name(self) -> str:
        """As workers derive it."""
        return self.model_name or Path(self.model).name
