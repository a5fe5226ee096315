"""A stream over TCP whose blocks the receiver reads out of the sender's pool by itself.

Heads, queries and partials cross the socket. A payload that lies in a registered pool is only
named there; the receiver reads it and says so, and until then the sender keeps it as it is. What
else arrives meanwhile waits. Called by `opening`.
"""

import socket
import struct
from collections import deque

from services.worker.distattention.transport.one_sided_pool import LandingBuffer, OneSidedPool
from services.worker.distattention.transport.socket_stream import SocketStream
from services.worker.distattention.wire import MAGIC, ErrorCode, Head, Kind, WireError

# Instead of MAGIC: who reads and is read, where the payload lies, and that it was read.
_INTRODUCTION = b"dNxI"
_BESIDE = b"dNxB"
_TAKEN = b"dNxT"
_ADDRESS = struct.Struct("<Q")


class OneSidedStream(SocketStream):
    def __init__(self, sock: socket.socket, timeout_s: float, pool: OneSidedPool) -> None:
        super().__init__(sock, timeout_s)
        self._pool = pool
        self._is_introduced = False
        self._peer: str | None = None
        self._address: int | None = None
        self._landing: LandingBuffer | None = None
        self._waiting: deque[Head] = deque()

    def send(self, head: Head, payload: bytes | memoryview = b"") -> None:
        address = self._pool.address_of(payload) if payload else None
        if address is None:
            super().send(head, payload)
            return
        if any(waiting.kind is Kind.ERROR for waiting in self._waiting):
            return  # refused already, which the next receive will tell
        if not self._is_introduced:
            metadata = self._pool.metadata
            self._send_all(_marked(_INTRODUCTION, Head(Kind.PING), len(metadata)), metadata)
            self._is_introduced = True
        self._send_all(_marked(_BESIDE, head, len(payload)), _ADDRESS.pack(address))
        self._await_taken()

    def receive_head(self, may_idle: bool = False) -> Head:
        if self._waiting:
            return self._waiting.popleft()
        head = self._next_head(may_idle)
        if head is None:
            raise WireError(ErrorCode.BAD_MESSAGE, "took what was not offered")
        return head

    def receive_into(self, payload: memoryview) -> None:
        if self._address is None:
            super().receive_into(payload)
            return
        if self._peer is None:
            raise WireError(ErrorCode.BAD_MESSAGE, "offers memory without an introduction")
        address, self._address = self._address, None
        landing, self._landing = self._landing_for(len(payload)), None
        self._pool.read(self._peer, address, payload, landing, self._timeout_s)
        self._landing = landing
        self._send_all(_marked(_TAKEN, Head(Kind.ACK), 0))

    def close(self) -> None:
        super().close()
        if self._landing is not None:
            self._pool.leave(self._landing)
            self._landing = None

    def _await_taken(self) -> None:
        while (head := self._next_head(may_idle=False)) is not None:
            self._waiting.append(head)
            if head.kind is Kind.ERROR:
                return  # refused; its text is what comes next
            if head.payload_bytes:
                text = f"{head.kind.name} instead of taking what was offered"
                raise WireError(ErrorCode.BAD_MESSAGE, text)

    def _next_head(self, may_idle: bool) -> Head | None:
        """None: what was offered was taken."""
        self._address = None
        while True:
            self._receive(self._head, may_idle)
            mark = bytes(self._head[: len(MAGIC)])
            if mark == MAGIC:
                return Head.unpack(self._head)
            if mark not in (_INTRODUCTION, _BESIDE, _TAKEN):
                raise WireError(ErrorCode.BAD_MESSAGE, "not a message of the data plane")
            self._head[: len(MAGIC)] = MAGIC
            head = Head.unpack(self._head)
            if mark == _TAKEN:
                return None
            if mark == _BESIDE:
                address = bytearray(_ADDRESS.size)
                self._receive(memoryview(address), may_idle=False)
                (self._address,) = _ADDRESS.unpack(address)
                return head
            self._peer = self._pool.learn(bytes(self.receive_bytes(head.payload_bytes)))

    def _landing_for(self, num_bytes: int) -> LandingBuffer:
        if self._landing is None or self._landing.num_bytes < num_bytes:
            if self._landing is not None:
                self._pool.leave(self._landing)
            self._landing = self._pool.land(num_bytes)
        return self._landing


def _marked(mark: bytes, head: Head, payload_bytes: int) -> bytes:
    return mark + head._replace(payload_bytes=payload_bytes).pack()[len(MAGIC) :]
