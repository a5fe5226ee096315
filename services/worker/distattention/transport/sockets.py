"""Sockets for the data plane: bound, connected and tuned. Called by `opening`."""

import os
import socket
import stat
from contextlib import suppress

from services.common.errors import ConfigError
from services.worker.distattention.transport.address import TcpAddress, UnixAddress

_UNIX_BUFFER_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 1.0

# A peer whose host vanished is noticed after idle + count * interval, i.e. 25 s.
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_COUNT = 3
_UNACKNOWLEDGED_TIMEOUT_MS = 25_000


def listen(address: UnixAddress | TcpAddress) -> socket.socket:
    """Binds and listens. A stale Unix path is removed; one that answers is ConfigError."""
    try:
        if isinstance(address, UnixAddress):
            return _listen_unix(address.path)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise ConfigError(f"{address}: cannot listen: {error}") from error


def connect(address: UnixAddress | TcpAddress, timeout_s: float) -> socket.socket:
    """Raises OSError where nobody answers within `timeout_s`."""
    if isinstance(address, TcpAddress):
        return tune(socket.create_connection((address.host, address.port), timeout=timeout_s))
    return tune(_connect_unix(address.path, timeout_s))


def tune(sock: socket.socket) -> socket.socket:
    """Makes a connected socket blocking and fit for small messages and whole blocks."""
    sock.settimeout(None)
    if sock.family == socket.AF_UNIX:
        # TCP is left alone: a fixed size would end the kernel's own growth of its windows.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER_BYTES)
        return sock
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, _KEEPALIVE_COUNT),
        (socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_TIMEOUT_MS),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock


def bound_to(listener: socket.socket) -> str:
    """The path, or host:port; tells the port where port 0 was asked for."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return str(name)
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def close_listener(listener: socket.socket) -> None:
    """Closes a listening socket and removes its Unix path."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else ""
    listener.close()
    if path:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _connect_unix(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_unix(path: str) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Removes the socket file that a killed process left; leaves alone what is in use."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"{path!r} exists and is not a socket")
        _connect_unix(path, _PROBE_TIMEOUT_S).close()
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
        return
    raise ConfigError(f"{path!r} is in use")
