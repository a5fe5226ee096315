"""Whether this router should be given requests: for /health and the gRPC health service."""

from services.common.health import HealthReporter
from services.router.discovery import Discovery


class Readiness:
    """Ready while an instance is ready and the router is not shutting down."""

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._stopping = False

    @property
    def is_ready(self) -> bool:
        return not self._stopping and bool(self._discovery.serving)

    def stop(self) -> None:
        self._stopping = True

    async def report_to(self, reporter: HealthReporter) -> None:
        if self.is_ready:
            await reporter.serving()
        else:
            await reporter.not_serving()
