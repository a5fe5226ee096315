"""A service process ends as its frame promises: by signal, by error, by itself."""

import signal
import subprocess
import sys

import pytest

PRELUDE = """
import asyncio, sys
from services.common.errors import ConfigError, Unavailable
from services.common.lifecycle import run
"""

WAITS = """
async def main(stop):
    print("ready", flush=True)
    await stop.wait()
    print("stopping", flush=True)
"""

IGNORES_STOP = WAITS + "    await asyncio.Event().wait()\n"


def start(body: str) -> "subprocess.Popen[str]":
    code = f"{PRELUDE}\n{body}\nsys.exit(run(main))"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_cleanly(signum: signal.Signals) -> None:
    with start(WAITS) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        output, errors = process.communicate(timeout=10)
    assert (process.returncode, output, errors) == (0, "stopping\n", "")


def test_a_second_signal_ends_at_once() -> None:
    with start(IGNORES_STOP) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_to_a_service_that_stops_by_itself_does_not_cut_it_short() -> None:
    stops_itself = """
async def main(stop):
    stop.set()
    print("ready", flush=True)
    await asyncio.Event().wait()
"""
    with start(stops_itself) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        ("ConfigError('INFINITE_LLM_PORT is required')", 2, "INFINITE_LLM_PORT is required\n"),
        ("Unavailable('no gManager')", 1, "unavailable: no gManager\n"),
    ],
)
def test_an_error_of_ours_is_one_line(error: str, status: int, line: str) -> None:
    with start(f"async def main(stop):\n    raise {error}") as process:
        _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (status, line)


def test_any_other_error_keeps_its_traceback() -> None:
    with start("async def main(stop):\n    raise ValueError('bug')") as process:
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "Traceback" in errors
    assert "ValueError: bug" in errors
