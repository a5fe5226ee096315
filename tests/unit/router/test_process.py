"""`python -m services.router` as a process: settings, start, SIGTERM, exit status."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from services.common.addresses import free_ports
from services.common.errors import ConfigError
from services.router.config import RouterConfig
from tests.unit.router.vocabulary import TEMPLATE, byte_level_bpe

DEADLINE_S = 30.0


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "model.safetensors").touch()
    return folder


def start(folder: Path, **settings: object) -> "subprocess.Popen[str]":
    ours = {f"INFINITE_LLM_{name.upper()}": str(value) for name, value in settings.items()}
    environ = {key: value for key, value in os.environ.items() if "INFINITE_LLM" not in key}
    return subprocess.Popen(
        [sys.executable, "-m", "services.router"],
        env=environ | {"INFINITE_LLM_MODEL": str(folder), **ours},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_and_whatever_it_has_started(model_folder: Path, signum: int) -> None:
    http_port, grpc_port, nobody = free_ports(3)
    process = start(
        model_folder,
        http_port=http_port,
        grpc_port=grpc_port,
        gmanager_address=f"127.0.0.1:{nobody}",
    )
    with process, httpx.Client(base_url=f"http://127.0.0.1:{http_port}") as http:
        limit_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                assert http.get("/live").status_code == 200
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < limit_s
                time.sleep(0.05)
        assert http.get("/health").status_code == 503
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        # Read by a process of its own.
        answer = http.post("/tokenize", json={"prompt": "x" * 500_000}, timeout=DEADLINE_S)
        assert answer.json()["count"] == 500_000
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signum)
        _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == (0 if signum == signal.SIGTERM else -signum)
    _, left = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert not left
    if signum == signal.SIGTERM:
        assert {json.loads(line)["service"] for line in log.splitlines()} == {"router"}


def test_a_port_in_use_is_one_line(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = start(model_folder, http_port=other.getsockname()[1], grpc_port=0)
        with process:
            _, log = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert log.splitlines()[-1].startswith("INFINITE_LLM_HTTP_PORT: ")
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"stream_idle_timeout_s": 0.0}, "STREAM_IDLE_TIMEOUT_S"),
        ({"max_concurrent_requests": 0}, "MAX_CONCURRENT_REQUESTS"),
        ({"http_port": 70_000}, "HTTP_PORT"),
        ({"shutdown_timeout_s": -1.0}, "SHUTDOWN_TIMEOUT_S"),
    ],
)
def test_bad_settings_name_their_variable(settings: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=f"INFINITE_LLM_{name} "):
        RouterConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (RouterConfig(model="org/small"), "small"),
        (RouterConfig(model="/models/small/"), "small"),
        (RouterConfig(model="/models/small", model_name="mine"), "mine"),
    ],
)
def test_served_name(config: RouterConfig, expected: str) -> None:
    assert config.served_name == expected
