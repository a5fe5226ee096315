"""Opens streams by address: the one place that knows every transport. Called by `link` and
`creditor`."""

import socket
from contextlib import suppress

from services.common.errors import ConfigError
from services.worker.distattention.transport.address import TcpAddress, UnixAddress, parse_address
from services.worker.distattention.transport.interface import Listener, Stream
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

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._tls = tls

    def listen(self, text: str, timeout_s: float) -> Listener:
        """Listens at once; streams fail after `timeout_s` without progress. Raises ConfigError."""
        address = self._checked(text)
        return _SocketListener(listen(address), self._tls_of(address), text, timeout_s)

    def connect(self, text: str, timeout_s: float) -> Stream:
        """Raises OSError where nobody fit answers within `timeout_s`."""
        try:
            address = self._checked(text)
        except ConfigError as error:
            raise OSError(error.message) from error
        sock, tls = connect(address, timeout_s), self._tls_of(address)
        return tls.connect(sock, timeout_s) if tls is not None else SocketStream(sock, timeout_s)

    def _checked(self, text: str) -> UnixAddress | TcpAddress:
        address = parse_address(text)
        if isinstance(address, TcpAddress) and address.is_tls and self._tls is None:
            raise ConfigError(f"{text!r} needs a certificate, a key and a CA here")
        if isinstance(address, TcpAddress) and not address.is_tls and self._tls is not None:
            raise ConfigError(f'{text!r} is not encrypted, while this instance has TLS: "tls:..."')
        return address

    def _tls_of(self, address: UnixAddress | TcpAddress) -> TlsFiles | None:
        return self._tls if isinstance(address, TcpAddress) else None


class _SocketListener:
    """A Listener."""

    def __init__(
        self, sock: socket.socket, tls: TlsFiles | None, address: str, timeout_s: float
    ) -> None:
        self._sock = sock
        self._tls = tls
        self._timeout_s = timeout_s
        self.address = f"{address.partition(':')[0]}:{bound_to(sock)}"

    def accept(self) -> Stream:
        sock, _ = self._sock.accept()
        try:
            tune(sock)
            if self._tls is not None:
                return self._tls.accept(sock, self._timeout_s)
            return SocketStream(sock, self._timeout_s)
        except OSError:
            sock.close()
            raise

    def stop(self) -> None:
        with suppress(OSError):
            # Closing alone would not wake the thread in accept().
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        close_listener(self._sock)
