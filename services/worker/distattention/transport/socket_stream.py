"""A stream over one connected socket, Unix or TCP.

Blocking, with the kernel's own timeouts: one system call for a head, one for a payload.
"""

import socket
import struct
import time
from contextlib import suppress

from services.worker.distattention.wire import HEAD_BYTES, Head

_TIMEVAL = struct.Struct("@ll")
_SCRATCH_BYTES = 1 << 16


class SocketStream:
    """A Stream. A peer that stalls fails within `timeout_s`, one that trickles within three times
    that. Owns the socket.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        seconds, fraction = divmod(timeout_s, 1.0)
        limit = _TIMEVAL.pack(int(seconds), max(1, int(fraction * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sock = sock
        self._timeout_s = timeout_s
        self._head = memoryview(bytearray(HEAD_BYTES))

    def send(self, head: Head, payload: bytes | memoryview = b"") -> None:
        self._send_all(head._replace(payload_bytes=len(payload)).pack(), payload)

    def receive_head(self, may_idle: bool = False) -> Head:
        self._receive(self._head, may_idle)
        return Head.unpack(self._head)

    def receive_into(self, payload: memoryview) -> None:
        self._receive(payload, may_idle=False)

    def receive_bytes(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return data

    def plain_socket(self) -> int | None:
        return self._sock.fileno()

    def drain(self, max_bytes: int) -> None:
        """Closing on unread bytes would reset the connection, and with it a last message on its
        way."""
        started = time.monotonic()
        scratch = bytearray(_SCRATCH_BYTES)
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            while max_bytes > 0 and (got := self._sock.recv_into(scratch)) > 0:
                max_bytes -= got
                self._check_time(started)

    def shutdown(self) -> None:
        with suppress(OSError):
            # Not the method of a TLS socket, which would go on without encryption.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _send_all(self, packed: bytes, payload: bytes | memoryview = b"") -> None:
        total = len(packed) + len(payload)
        started = time.monotonic()
        try:
            sent = self._sock.sendmsg((packed, payload))
            if sent == total:
                return
            rest = memoryview(packed + bytes(payload))
            while sent < total:
                self._check_time(started)
                sent += self._sock.send(rest[sent:])
        except BlockingIOError:
            raise self._timed_out() from None

    def _receive(self, view: memoryview, may_idle: bool) -> None:
        started = 0.0
        done = 0
        while done < len(view):
            try:
                got = self._sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if may_idle and done == 0:
                    continue
                raise self._timed_out() from None
            done, started = self._advance(done, got, len(view), started)

    def _advance(self, done: int, got: int, total: int, started: float) -> tuple[int, float]:
        """How much is there after `got` more bytes, and when the first of them came."""
        if got == 0:
            raise ConnectionResetError("the connection was closed")
        if done == 0:
            started = time.monotonic()
        elif done + got < total:
            self._check_time(started)
        return done + got, started

    def _check_time(self, started: float) -> None:
        if time.monotonic() - started >= self._timeout_s:
            raise self._timed_out()

    def _timed_out(self) -> TimeoutError:
        return TimeoutError(f"nothing moved within {self._timeout_s:g} s")
