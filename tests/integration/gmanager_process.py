"""`python -m services.gmanager` as a process that tests start, stop, freeze and read the log of."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.infinite_llm.v1 import gmanager_pb2_grpc
from services.common.addresses import free_ports
from services.common.rpc import open_channel
from tests.integration.redis_server import START_DEADLINE_S

REPO = Path(__file__).parents[2]
#: For a call that Redis must not slow down, on a busy machine.
PROMPT_S = 0.9


class GManagerProcess:
    def __init__(self, log_path: Path, **settings: object) -> None:
        port, self._metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self._log_path = log_path
        fields = {
            "listen_address": self.address,
            "metrics_port": self._metrics_port,
            "instance_timeout_s": 60,
            **settings,
        }
        self._environ = {
            f"INFINITE_LLM_{name.upper()}": str(value) for name, value in fields.items()
        }
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "services.gmanager"]
        environ = {**os.environ, **self._environ}
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=REPO, env=environ, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log_path.read_text().splitlines()]

    @property
    def roles(self) -> list[str]:
        """What it has been so far, in order."""
        return [line["role"] for line in self.log if "role" in line]

    def metric(self, sample: str) -> float | None:
        """The value of `name{label="value"}`; None while it is not told."""
        text = httpx.get(f"http://127.0.0.1:{self._metrics_port}/metrics", trust_env=False).text
        prefix = f"infinite_llm_gmanager_{sample} "
        values = [line.removeprefix(prefix) for line in text.splitlines() if prefix in line]
        return float(values[0]) if values else None

    @asynccontextmanager
    async def stub(self) -> AsyncIterator["gmanager_pb2_grpc.GManagerAsyncStub"]:
        async with open_channel(self.address) as channel:
            await asyncio.wait_for(channel.channel_ready(), START_DEADLINE_S)
            await self._wait_serving(channel)
            yield gmanager_pb2_grpc.GManagerStub(channel)

    async def _wait_serving(self, channel: grpc.aio.Channel) -> None:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="")
        async with asyncio.timeout(START_DEADLINE_S):
            while True:
                answer = await health.Check(request, timeout=PROMPT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                await asyncio.sleep(0.05)
