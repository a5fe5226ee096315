"""What carries the messages of the data plane, whatever lies below. `opening` makes these.

A stream serves queries, partials and blocks alike: the payload goes from memory that exists at one
end into memory that exists at the other.
"""

from typing import Protocol

from services.worker.distattention.wire import Head


class NotTrusted(OSError):
    """The other end could not show that it belongs to the cluster, or does not take us for one."""


class Stream(Protocol):
    """One connection that carries whole messages. Used by both ends; one thread at a time.

    Every failure is an OSError (TimeoutError where nothing moved in time) or a WireError, after
    which the stream is out of step and must be closed. A peer that dies or stalls makes every call
    fail within a time that is bounded.
    """

    def send(self, head: Head, payload: bytes | memoryview = b"") -> None:
        """`head.payload_bytes` is filled in here. The payload may be reused once this returns."""
        ...

    def receive_head(self, may_idle: bool = False) -> Head:
        """Waits for the next message; with `may_idle` for as long as the peer is alive."""
        ...

    def receive_into(self, payload: memoryview) -> None:
        """The whole payload of the message whose head came last."""
        ...

    def receive_bytes(self, num_bytes: int) -> bytearray:
        """The same, for small payloads only; the head's bounds keep it so."""
        ...

    def plain_socket(self) -> int | None:
        """The descriptor over which heads cross as they are, and after each its payload, unless
        that lies in a KV pool. None where only this stream can read and write it."""
        ...

    def drain(self, max_bytes: int) -> None:
        """Sends no more, and drops what comes until the peer hangs up or the bounds are reached."""
        ...

    def shutdown(self) -> None:
        """Ends both directions at once. The only call that another thread may make."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """Where an instance's data plane is reached."""

    @property
    def address(self) -> str:
        """Where others connect; the real port where port 0 was asked for."""
        ...

    def accept(self) -> Stream:
        """Blocks until somebody connects. Raises OSError, always so once `stop` was called."""
        ...

    def stop(self) -> None:
        """Wakes the thread in `accept`. Called by another one, which then calls `close`."""
        ...

    def close(self) -> None: ...
