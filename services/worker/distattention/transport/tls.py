"""Mutual TLS: each end shows a certificate of the cluster's own authority, or is refused.

A certificate says that its holder belongs to the cluster, not which instance it is: instances are
reached by addresses that change. HELLO names them. Called by `opening`.
"""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import ConfigError
from services.worker.distattention.transport.interface import NotTrusted
from services.worker.distattention.transport.socket_stream import SocketStream
from services.worker.distattention.wire import Head

# One record of TLS; what is larger is not worth a copy to send it with its head.
_RECORD_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. Read anew for each connection, so that certificates may be renewed meanwhile."""

    certificate: Path
    key: Path
    ca: Path

    def check(self) -> None:
        """Raises ConfigError where they cannot be used."""
        try:
            self._context(ssl.PROTOCOL_TLS_SERVER)
        except OSError as error:
            raise ConfigError(f"certificate, key or CA of the data plane: {error}") from error

    def connect(self, sock: socket.socket, timeout_s: float) -> "TlsStream":
        """Takes over a connected socket. Raises OSError, after which it is closed."""
        with sock:  # the wrapped one is another object, which takes the descriptor
            context = self._context(ssl.PROTOCOL_TLS_CLIENT)
            wrapped = context.wrap_socket(sock, do_handshake_on_connect=False)
        stream = TlsStream(wrapped, timeout_s)
        try:
            stream.greet()
        except OSError:
            stream.close()
            raise
        return stream

    def accept(self, sock: socket.socket, timeout_s: float) -> "TlsStream":
        """The same; the peer is looked at when something is received, on the reader's thread."""
        with sock:
            context = self._context(ssl.PROTOCOL_TLS_SERVER)
            wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return TlsStream(wrapped, timeout_s)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.ca)
        return context


class TlsStream(SocketStream):
    """A SocketStream whose bytes are encrypted. Python's timeouts: OpenSSL retries the kernel's."""

    def __init__(self, sock: ssl.SSLSocket, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        super().__init__(sock, timeout_s)
        self._tls = sock
        self._has_received = False
        """Then the peer has shown who it is, and has accepted us."""

    def greet(self) -> None:
        with self._explained():
            self._tls.do_handshake()

    def send(self, head: Head, payload: bytes | memoryview = b"") -> None:
        packed = head._replace(payload_bytes=len(payload)).pack()
        with self._explained():
            if len(payload) < _RECORD_BYTES:
                self._tls.sendall(packed + bytes(payload))
                return
            self._tls.sendall(packed)
            self._tls.sendall(payload)

    def plain_socket(self) -> int | None:
        return None

    def _receive(self, view: memoryview, may_idle: bool) -> None:
        started = 0.0
        done = 0
        while done < len(view):
            try:
                with self._explained():
                    got = self._tls.recv_into(view[done:])
            except TimeoutError:
                if may_idle and done == 0:
                    continue
                raise
            done, started = self._advance(done, got, len(view), started)
            self._has_received = True

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise self._timed_out() from None
        except ssl.SSLCertVerificationError as error:
            text = f"the peer's certificate is not valid here: {error.verify_message}"
            raise NotTrusted(text) from error
        except ssl.SSLError as error:
            reason = error.reason or error
            if self._has_received:
                raise ConnectionError(f"the connection broke: {reason}") from error
            # Its alert may have been lost: all that is known then is that it hung up.
            raise NotTrusted(f"no mutual TLS with the peer: {reason}") from error
