"""Standard gRPC health and reflection for every server that we start.

`""` is the server as a whole; a service is also listed under its own full name. LIVENESS is what a
supervisor asks that would end a process: a server that answers at all is alive, ready or not.
"""

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

LIVENESS = "liveness"


class HealthReporter:
    """Owns what the health service of one server says.

    The library says that all is well from the start: a server that is not ready when it starts
    calls `not_serving` before.
    """

    def __init__(self, server: grpc.aio.Server, service_names: Sequence[str]) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names = ("", *service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        listed = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(listed, server)

    async def serving(self) -> None:
        await self._set_all(health_pb2.HealthCheckResponse.SERVING)

    async def not_serving(self) -> None:
        await self._set_all(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def be_ready(self, is_ready: bool) -> None:
        await (self.serving() if is_ready else self.not_serving())

    async def _set_all(self, status: int) -> None:
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        for name in self._names:
            await self._servicer.set(name, status)
