"""Addresses of the data plane, as settings and heartbeats carry them.

unix:/path       a Unix socket, within a host
tcp:host:port    between hosts
tls:host:port    the same with mutual TLS
nixl:host:port   TCP, while blocks are read one-sidedly through NIXL
"""

import os
from dataclasses import dataclass
from typing import Literal, cast

from services.common.errors import ConfigError

#: `sun_path` holds 108 bytes with its terminating zero.
_MAX_UNIX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int
    scheme: Literal["tcp", "tls", "nixl"] = "tcp"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}:{host}:{self.port}"


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Raises ConfigError where the text is not an address."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        if len(os.fsencode(rest)) > _MAX_UNIX_PATH_BYTES:
            raise ConfigError(f"{text!r}: longer than a Unix socket path may be")
        return UnixAddress(rest)
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    if scheme in ("tcp", "tls", "nixl") and host and is_port:
        return TcpAddress(host, int(port), cast(Literal["tcp", "tls", "nixl"], scheme))
    wanted = '"unix:/path", "tcp:host:port", "tls:host:port" or "nixl:host:port"'
    raise ConfigError(f"{text!r}: not an address like {wanted}")
