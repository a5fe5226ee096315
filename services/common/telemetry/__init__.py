"""Logs, traces and metrics, the same for every service."""

from services.common.telemetry.logs import configure_logging, req_id_context
from services.common.telemetry.metrics import MetricsServer, start_metrics_server
from services.common.telemetry.traces import configure_tracing, tracer

__all__ = [
    "MetricsServer",
    "configure_logging",
    "configure_tracing",
    "req_id_context",
    "start_metrics_server",
    "tracer",
]
