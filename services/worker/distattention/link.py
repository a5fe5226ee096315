"""The owner's end of one connection to one other instance. Under `debtor` and `transfer`."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from services.common.errors import PartLost
from services.worker.distattention.metrics import SideMetrics
from services.worker.distattention.transport.interface import Stream
from services.worker.distattention.transport.opening import Transport
from services.worker.distattention.wire import (
    ErrorCode,
    Geometry,
    Head,
    Hello,
    Kind,
    Peer,
    WireError,
)


@dataclass(frozen=True, slots=True)
class Borrowing:
    """What all connections of one owner have in common."""

    me: Peer
    geometry: Geometry
    transport: Transport
    deadline_s: float
    """For every wait on the other end."""
    metrics: SideMetrics | None = None
    on_blocks: Callable[[Peer, int, float], None] = lambda _creditor, _num_bytes, _duration_s: None
    """Told of blocks that crossed, their bytes and the seconds that they took."""


class PeerLink:
    """Connects and greets; then a scope (`with link: ...`) in which every failure of the
    connection becomes PartLost and closes it for good. A closed link raises on entry."""

    def __init__(self, borrowing: Borrowing, peer: Peer, max_rows: int) -> None:
        """`max_rows`: the most rows of a query; 0 for block copies only."""
        self._peer = peer
        self._metrics = borrowing.metrics
        self._stream: Stream | None = None
        me, geometry = borrowing.me, borrowing.geometry
        hello = Hello(
            me.inst_id, me.incarnation, peer.inst_id, peer.incarnation, geometry, max_rows
        )
        try:
            self._stream = borrowing.transport.connect(peer.data_address, borrowing.deadline_s)
        except OSError as error:
            raise self._lost(error) from error
        with self:
            self.send(Head(Kind.HELLO), hello.pack())
            self.expect(Kind.WELCOME)

    def send(self, head: Head, payload: bytes | memoryview = b"") -> None:
        self._open_stream().send(head, payload)

    def expect(self, kind: Kind) -> Head:
        """The head of the next message, which must be of this kind."""
        return self.checked(self._open_stream().receive_head(), kind)

    def checked(self, head: Head, kind: Kind) -> Head:
        """The same of a message whose head came already."""
        stream = self._open_stream()
        if head.kind is Kind.ERROR:
            text = stream.receive_bytes(head.payload_bytes).decode(errors="replace")
            raise WireError(_error_code(head.item), text)
        if head.kind is not kind:
            raise WireError(ErrorCode.BAD_MESSAGE, f"{head.kind.name} instead of {kind.name}")
        return head

    def receive_into(self, payload: memoryview) -> None:
        self._open_stream().receive_into(payload)

    def plain_socket(self) -> int | None:
        """Where `transport` lets others than the stream read and write."""
        return self._open_stream().plain_socket()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Self:
        self._open_stream()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            return
        # Whatever interrupted a message, what follows in the stream has no meaning any more.
        self.close()
        if isinstance(error, OSError | WireError):
            raise self._lost(error) from error

    def _open_stream(self) -> Stream:
        if self._stream is None:
            raise self._part_lost("the connection is closed")
        return self._stream

    def _lost(self, error: OSError | WireError) -> PartLost:
        if self._metrics is not None:
            self._metrics.record_failure()
        text = f"{error.error.name}: {error}" if isinstance(error, WireError) else str(error)
        return self._part_lost(text or type(error).__name__)

    def _part_lost(self, text: str) -> PartLost:
        return PartLost(self._peer.inst_id, text, self._peer.incarnation)


def _error_code(number: int) -> ErrorCode:
    try:
        return ErrorCode(number)
    except ValueError:
        return ErrorCode.INTERNAL
