"""Addresses of the data plane: "unix:/path" within a host, "tcp:host:port" between hosts.

Called by `link` (connect) and `creditor` (listen). Sockets come back blocking and tuned.
"""

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass

from services.common.errors import ConfigError

#: `sun_path` holds 108 bytes with its terminating zero.
_MAX_UNIX_PATH_BYTES = 107
_UNIX_BUFFER_BYTES = 1 << 20
_PROBE_TIMEOUT_S = 1.0

# A peer whose host vanished is noticed after idle + count * interval, i.e. 25 s.
_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_COUNT = 3
_UNACKNOWLEDGED_TIMEOUT_MS = 25_000


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Raises ConfigError where the text is not an address."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        if len(os.fsencode(rest)) > _MAX_UNIX_PATH_BYTES:
            raise ConfigError(f"{text!r}: longer than a Unix socket path may be")
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if scheme == "tcp" and host and port.isascii() and port.isdigit() and int(port) <= 65535:
        return TcpAddress(host, int(port))
    raise ConfigError(f'{text!r}: not an address like "unix:/path" or "tcp:host:port"')


def listen(text: str) -> socket.socket:
    """Binds and listens. A stale Unix path is removed; one that answers is ConfigError."""
    address = parse_address(text)
    try:
        if isinstance(address, UnixAddress):
            return _listen_unix(address.path)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise ConfigError(f"{text!r}: cannot listen: {error}") from error


def connect(text: str, timeout_s: float) -> socket.socket:
    """Raises OSError where nobody answers within `timeout_s`."""
    address = parse_address(text)
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


def bound_address(listener: socket.socket) -> str:
    """The address that others connect to; tells the port where port 0 was asked for."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host, port = name[:2]
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


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
