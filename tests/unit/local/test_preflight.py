"""What cannot work is said before anything starts."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from services.common.addresses import free_ports, is_port_free
from services.common.errors import ConfigError
from services.local.preflight import check_ports, find_redis_server, runtime_folder


def test_free_ports_pass() -> None:
    check_ports(next(p for p in free_ports(20) if is_port_free("127.0.0.1", p + 1)))


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_named(offset: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not is_port_free("127.0.0.1", port - 1):
            offset = 0
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            check_ports(port - offset)


@pytest.mark.parametrize("port", [0, -1, 65535, 65536])
def test_a_port_that_cannot_be_is_refused_by_the_name_it_was_given(port: int) -> None:
    with pytest.raises(ConfigError, match=f"^PORT={port} is not in 1..65534"):
        check_ports(port)


def test_the_machines_redis_comes_first(tmp_path: Path) -> None:
    server = tmp_path / "redis-server"
    server.touch(mode=0o755)
    assert find_redis_server({"PATH": str(tmp_path)}) == str(server)


def test_without_one_the_wheels_redis_is_used(tmp_path: Path) -> None:
    server = find_redis_server({"PATH": str(tmp_path)})
    done = subprocess.run([server, "--version"], capture_output=True, timeout=10, check=True)
    assert b"Redis server" in done.stdout


def test_the_runtime_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = runtime_folder(8000)
    assert folder == runtime_folder(8000) == tmp_path / f"infinite-llm-{os.getuid()}" / "8000"
    assert folder.stat().st_mode & 0o077 == 0
