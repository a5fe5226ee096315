"""Opens streams by address: the one place that knows every transport. Called by `link` and
`creditor`."""

import socket
from contextlib import suppress

from services.common.errors import ConfigError
from services.worker.distattention.transport.address import TcpAddress, UnixAddress, parse_address
from services.worker.distattention.transport.interface import Listener, Stream
from services.worker.distattention.transport.one_sided_pool import OneSidedPool
from services.worker.distattention.transport.one_sided_stream import OneSidedStream
from services.worker.distattention.transport.socket_stream import SocketStream
from services.worker.distattention.transport.sockets import (
    bound_to,
    close_listener,
    connect,
    listen,
    tune,
)
from services.worker.distattention.transport.tls import TlsFiles


class Transport:
    """What this instance can speak. Without `tls` no "tls:" address can be used; with it no "tcp:"
    one is, so that nobody can talk us out of it."""

    def __init__(self, tls: TlsFiles | None = None, pool: OneSidedPool | None = None) -> None:
        """`pool`: the KV memory as NIXL has it, for "nixl:" addresses."""
        self._tls = tls
        self._pool = pool

    def listen(self, text: str, timeout_s: float) -> Listener:
        """Listens at once; streams fail after `timeout_s` without progress. Raises ConfigError."""
        address = self._checked(text)
        return _SocketListener(listen(address), address, self, timeout_s)

    def connect(self, text: str, timeout_s: float) -> Stream:
        """Raises OSError where nobody fit answers within `timeout_s`."""
        try:
            address = self._checked(text)
        except ConfigError as error:
            raise OSError(error.message) from error
        sock = connect(address, timeout_s)
        if _scheme(address) == "tls" and self._tls is not None:
            return self._tls.connect(sock, timeout_s)
        return self.over(sock, address, timeout_s)

    def accepted(
        self, sock: socket.socket, address: UnixAddress | TcpAddress, timeout_s: float
    ) -> Stream:
        """Over a socket that this address accepted."""
        if _scheme(address) == "tls" and self._tls is not None:
            return self._tls.accept(sock, timeout_s)
        return self.over(sock, address, timeout_s)

    def over(
        self, sock: socket.socket, address: UnixAddress | TcpAddress, timeout_s: float
    ) -> Stream:
        """Where both ends are alike."""
        if _scheme(address) == "nixl" and self._pool is not None:
            return OneSidedStream(sock, timeout_s, self._pool)
        return SocketStream(sock, timeout_s)

    def _checked(self, text: str) -> UnixAddress | TcpAddress:
        address = parse_address(text)
        scheme = _scheme(address)
        if scheme == "tls" and self._tls is None:
            raise ConfigError(f"{text!r} needs a certificate, a key and a CA here")
        if scheme == "nixl" and self._pool is None:
            raise ConfigError(f"{text!r} needs NIXL here, which only an own nixl: address starts")
        if scheme in ("tcp", "nixl") and self._tls is not None:
            raise ConfigError(f'{text!r} is not encrypted, while this instance has TLS: "tls:..."')
        return address


def _scheme(address: UnixAddress | TcpAddress) -> str:
    return address.scheme if isinstance(address, TcpAddress) else "unix"


class _SocketListener:
    """A Listener."""

    def __init__(
        self,
        sock: socket.socket,
        asked: UnixAddress | TcpAddress,
        transport: Transport,
        timeout_s: float,
    ) -> None:
        self._sock = sock
        self._asked = asked
        self._transport = transport
        self._timeout_s = timeout_s
        self.address = f"{_scheme(asked)}:{bound_to(sock)}"

    def accept(self) -> Stream:
        sock, _ = self._sock.accept()
        try:
            tune(sock)
            return self._transport.accepted(sock, self._asked, self._timeout_s)
        except OSError:
            sock.close()
            raise

    def stop(self) -> None:
        with suppress(OSError):
            # Closing alone would not wake the thread in accept().
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        close_listener(self._sock)
