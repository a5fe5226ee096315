"""The supervisor as people start it: it restarts what dies and leaves nothing behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import psutil
import pytest

from services.common.addresses import free_ports, is_port_free

pytestmark = [pytest.mark.integration, pytest.mark.model, pytest.mark.timeout(300)]

STOP_DEADLINE_S = 60.0


@contextmanager
def supervisor() -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    """A cluster of one instance, serving. Killed at the end if it still runs."""
    port = next(port for port in free_ports(20) if is_port_free("127.0.0.1", port + 1))
    command = [sys.executable, "-m", "services.local", "up", "--no-prompt"]
    command += ["--instances", "1", "--kv-blocks", "8", "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            read_until(process.stdout, "Ctrl-C stops everything")
            yield process, process.stdout
        finally:
            process.kill()


def read_until(output: IO[str], text: str) -> None:
    """The test's own deadline ends a wait for what never comes."""
    lines: list[str] = []
    for line in output:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}:\n{''.join(lines)}")


def children_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4, children
    return children


def assert_all_gone(children: list[psutil.Process]) -> None:
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_what_dies_is_restarted_and_a_signal_stops_everything() -> None:
    with supervisor() as (process, output):
        (worker,) = (c for c in children_of(process) if "services.worker" in c.cmdline())
        worker.kill()
        read_until(output, "worker-0 ended with status -9")
        read_until(output, "worker-0 is back")
        children = children_of(process)
        process.send_signal(signal.SIGTERM)
        read_until(output, "everything has stopped")
        assert process.wait(STOP_DEADLINE_S) == 0
    assert_all_gone(children)


def test_a_killed_supervisor_leaves_nothing_behind() -> None:
    with supervisor() as (process, _):
        children = children_of(process)
        process.kill()
        process.wait(STOP_DEADLINE_S)
        assert_all_gone(children)
