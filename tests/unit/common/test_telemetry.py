"""Logs are JSON lines with the request's id; metrics are served until closed."""

import json
import logging
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common.addresses import free_ports, is_port_free
from services.common.errors import ConfigError
from services.common.ids import ReqId
from services.common.telemetry import configure_logging, req_id_context, start_metrics_server
from services.common.telemetry.logs import JsonFormatter


def line_of(record: logging.LogRecord) -> dict[str, object]:
    line: dict[str, object] = json.loads(JsonFormatter("worker").format(record))
    return line


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("engine").makeRecord(
        "engine", logging.INFO, __file__, 1, message, args, None, extra=extra
    )


def test_a_line_says_who_and_what() -> None:
    line = line_of(record("moved %d blocks", 4, inst_id=2))
    assert line.pop("time")
    assert line == {
        "level": "info",
        "service": "worker",
        "logger": "engine",
        "message": "moved 4 blocks",
        "inst_id": 2,
    }


def test_the_request_at_hand_is_named() -> None:
    token = req_id_context.set(ReqId(7))
    try:
        assert line_of(record("step"))["req_id"] == "7"
    finally:
        req_id_context.reset(token)
    assert "req_id" not in line_of(record("step"))


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("bug")
    except ValueError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    assert "ValueError: bug" in str(line_of(failed)["exception"])


def test_lines_go_to_stderr() -> None:
    code = (
        "from services.common.telemetry import configure_logging; import logging\n"
        "configure_logging('router', 'WARNING')\n"
        "logging.info('quiet'); logging.warning('loud')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout == ""
    assert json.loads(done.stderr)["message"] == "loud"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="INFINITE_LLM_LOG_LEVEL must be one of"):
        configure_logging("router", "chatty")


def test_metrics_are_served_until_closed() -> None:
    registry = CollectorRegistry()
    Counter("moves", "Moves issued.", registry=registry).inc(3)
    (port,) = free_ports(1)
    with start_metrics_server(port, "127.0.0.1", registry):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            assert b"moves_total 3.0" in response.read()
        with pytest.raises(ConfigError, match=f"INFINITE_LLM_METRICS_PORT={port}"):
            start_metrics_server(port, "127.0.0.1", registry)
    assert is_port_free("127.0.0.1", port)


def test_port_zero_serves_nothing() -> None:
    start_metrics_server(0, "127.0.0.1", CollectorRegistry()).close()


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:1"])
def test_spans_are_made_where_a_collector_takes_them(endpoint: str) -> None:
    code = (
        "from services.common.telemetry import configure_tracing, tracer\n"
        f"provider = configure_tracing('worker', {endpoint!r})\n"
        "with tracer('t').start_as_current_span('step') as span:\n"
        f"    assert span.is_recording() is {bool(endpoint)}\n"
        "print(provider.resource.attributes['service.name'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "worker\n")
