"""What cannot work is said before anything starts."""

import os
import socket
import subprocess
from pathlib import Path

import pytest

from services.common.addresses import free_ports
from services.common.errors import ConfigError
from services.local.preflight import check_ports, find_redis_server, runtime_folder


def test_free_ports_pass() -> None:
    check_ports(*free_ports(2))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use"):
            check_ports(*free_ports(1), port)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="is not in"):
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
