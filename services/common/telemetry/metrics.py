"""The Prometheus endpoint of a service (`/metrics` on its own port)."""

from types import TracebackType
from typing import Self

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from services.common.errors import ConfigError


class MetricsServer:
    """Serves a registry until closed. Port 0 serves nothing."""

    def __init__(self, port: int, host: str, registry: CollectorRegistry) -> None:
        self._running = None
        if port:
            try:
                self._running = start_http_server(port, addr=host, registry=registry)
            except OSError as error:
                raise ConfigError(f"INFINITE_LLM_METRICS_PORT={port}: {error.strerror}") from error

    def close(self) -> None:
        if self._running is None:
            return
        server, thread = self._running
        self._running = None
        server.shutdown()
        server.server_close()
        thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def start_metrics_server(
    port: int, host: str, registry: CollectorRegistry = REGISTRY
) -> MetricsServer:
    """`host`: where the service itself listens; its metrics are as public as it is."""
    return MetricsServer(port, host, registry)
