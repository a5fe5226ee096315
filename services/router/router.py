"""The router as one object: its parts wired top to bottom, started and stopped in order.

Built by `__main__`.
"""

import asyncio
import logging

from services.common.addresses import split_addresses
from services.common.gmanagers import GManagers
from services.common.health import HealthReporter
from services.common.telemetry import start_metrics_server
from services.router.admission import Admission
from services.router.config import RouterConfig
from services.router.discovery import Discovery
from services.router.dispatch import Dispatcher
from services.router.generation import Generation
from services.router.grpc_server import SERVICE_NAME, GrpcLimits, GrpcServer, InferenceServicer
from services.router.http.app import Door, Routes, create_app
from services.router.http.event_stream import StreamPace
from services.router.http.parsing import BodyParser
from services.router.http.routes import HttpLimits, OpenAiRoutes
from services.router.http.server import HttpServer
from services.router.http.tokens import TokenRoutes
from services.router.metrics import RouterMetrics
from services.router.readiness import Readiness
from services.router.renewed import Renewed
from services.router.served_model import ServedModel
from services.router.turns import QueueLimits
from services.router.worker_call import StreamTimeouts
from services.router.worker_channels import WorkerChannels

_log = logging.getLogger(__name__)


class Router:
    """Listens from construction on, which needs a running event loop."""

    def __init__(self, config: RouterConfig, model: ServedModel) -> None:
        self.started = asyncio.Event()
        """Set once both doors are open."""
        self._shutdown_timeout_s = config.shutdown_timeout_s
        self._model = model
        metrics = RouterMetrics()
        self._gmanagers = GManagers(split_addresses(config.gmanager_address))
        self._discovery = Discovery(self._gmanagers, model.name, config.pooling)
        self._readiness = Readiness(self._discovery)
        timeouts = StreamTimeouts(
            config.first_token_timeout_s, config.stream_idle_timeout_s, config.resume_timeout_s
        )
        limits = QueueLimits(
            config.max_queued_requests, config.queue_timeout_s, config.queue_patience_s
        )
        channels = WorkerChannels(config.dead_after_s)
        self._dispatcher = Dispatcher(self._discovery, channels, timeouts, limits, metrics)
        self._admission = Admission(config.max_concurrent_requests)
        generation = Generation(model, self._discovery, self._dispatcher, self._admission, metrics)
        self._renewed = Renewed.load(config)
        self._parser = BodyParser()
        self._http = self._http_door(config, generation, metrics)
        self._grpc = self._grpc_door(config, generation, metrics)
        self._metrics_server = start_metrics_server(
            config.metrics_port, config.http_host, metrics.registry
        )
        self._health = HealthReporter(self._grpc.server, [SERVICE_NAME])

    def _http_door(
        self, config: RouterConfig, generation: Generation, metrics: RouterMetrics
    ) -> HttpServer:
        pace = StreamPace(config.stream_idle_timeout_s, config.keep_alive_s)
        limits = HttpLimits(config.max_body_bytes, pace)
        routes = Routes(
            OpenAiRoutes(generation, self._parser, limits),
            TokenRoutes(generation, self._parser, config.max_body_bytes),
        )
        door = Door(self._renewed.keys, config.max_open_requests)
        app = create_app(routes, self._readiness, metrics, door)
        timeout_s, tls = config.shutdown_timeout_s, self._renewed.tls
        return HttpServer(app, config.http_host, config.http_port, timeout_s, tls)

    def _grpc_door(
        self, config: RouterConfig, generation: Generation, metrics: RouterMetrics
    ) -> GrpcServer:
        write_timeout_s = config.stream_idle_timeout_s
        servicer = InferenceServicer(generation, self._readiness, metrics, write_timeout_s)
        limits = GrpcLimits(config.max_body_bytes, self._renewed.keys, self._renewed.tls)
        return GrpcServer(servicer, config.http_host, config.grpc_port, limits)

    @property
    def http_port(self) -> int:
        return self._http.port

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    async def serve(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set; then unready at once, and running streams may end."""
        await self._discovery.refresh()
        await self._readiness.report_to(self._health)
        await self._grpc.server.start()
        detail = {"model": self._model.name, "http": self.http_port, "grpc": self.grpc_port}
        _log.info("serving", extra=detail)
        async with asyncio.TaskGroup() as group:
            discovering = group.create_task(self._discovery.run(self._after_refresh))
            renewing = group.create_task(self._renewed.run())
            group.create_task(self._http.serve(stop))
            self.started.set()
            await stop.wait()
            _log.info("stopping", extra={"in_flight": self._admission.num_sequences})
            self._readiness.stop()
            self._admission.close()
            await self._readiness.report_to(self._health)
            # A little before connections are cut, so that every stream ends with an error event.
            margin_s = min(1.0, self._shutdown_timeout_s / 2)
            now_s = asyncio.get_running_loop().time()
            self._dispatcher.end_by(now_s + self._shutdown_timeout_s - margin_s)
            await self._grpc.server.stop(self._shutdown_timeout_s)
            discovering.cancel()
            renewing.cancel()
        await self._dispatcher.close()
        await self._gmanagers.close()
        await self._model.grammars.close()
        self._model.tokenizer.close()
        self._parser.close()
        self._metrics_server.close()

    async def _after_refresh(self) -> None:
        await self._readiness.report_to(self._health)
        await self._dispatcher.on_view()
