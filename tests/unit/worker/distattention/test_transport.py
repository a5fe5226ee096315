"""What every transport must do, whatever carries its bytes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.worker.distattention.transport.interface import Stream
from services.worker.distattention.transport.opening import Transport
from services.worker.distattention.wire import Head, Kind
from tests.unit.worker.distattention.pieces import DEADLINE_S, socket_of, transport_for

Ends = tuple[Stream, Stream]


@pytest.fixture
def ends(address: str) -> Iterator[Ends]:
    """Who connected and who accepted; the first message has crossed."""
    transport = transport_for(address)
    with ExitStack() as stack:
        listener = transport.listen(address, DEADLINE_S)
        stack.callback(listener.close)
        accepted: list[Stream] = []

        def greet() -> None:
            stream = listener.accept()
            stack.callback(stream.close)
            assert stream.receive_head().kind is Kind.HELLO
            accepted.append(stream)

        greeting = threading.Thread(target=greet)
        greeting.start()
        near = transport.connect(listener.address, DEADLINE_S)
        stack.callback(near.close)
        near.send(Head(Kind.HELLO))
        greeting.join()
        yield near, accepted[0]


def pattern(num_bytes: int, seed: int) -> bytes:
    return bytes((i * 31 + seed) % 251 for i in range(1009)) * (num_bytes // 1009 + 1)


@pytest.mark.parametrize("num_bytes", [0, 1, 2304, 70_000, 360_000, 5_000_000])
def test_messages_of_any_size_cross_both_ways(ends: Ends, num_bytes: int) -> None:
    for sender, receiver in (ends, ends[::-1]):
        payload = pattern(num_bytes, seed=num_bytes)[:num_bytes]
        sending = threading.Thread(target=sender.send, args=(Head(Kind.COPY, 1, 2, 3), payload))
        sending.start()
        head = receiver.receive_head()
        assert head == (Kind.COPY, 1, 2, 3, num_bytes)
        into = bytearray(num_bytes)
        receiver.receive_into(memoryview(into))
        assert into == payload
        sending.join()


def test_messages_keep_their_order_however_many_are_under_way(ends: Ends) -> None:
    sender, receiver = ends
    sizes = [(i * 7919) % 400_000 for i in range(60)]

    def send_all() -> None:
        for i, size in enumerate(sizes):
            sender.send(Head(Kind.COPY, i), pattern(size, seed=i)[:size])

    sending = threading.Thread(target=send_all)
    sending.start()
    for i, size in enumerate(sizes):
        head = receiver.receive_head()
        assert (head.item, head.payload_bytes) == (i, size)
        assert receiver.receive_bytes(size) == pattern(size, seed=i)[:size]
    sending.join()


def test_a_payload_may_be_reused_as_soon_as_it_is_sent(ends: Ends) -> None:
    sender, receiver = ends
    payload = bytearray(b"first" * 100)
    sender.send(Head(Kind.QUERY), memoryview(payload))
    payload[:] = bytes(len(payload))
    assert receiver.receive_bytes(receiver.receive_head().payload_bytes) == b"first" * 100


def test_an_end_that_closes_is_noticed_by_the_other(ends: Ends) -> None:
    near, far = ends
    near.send(Head(Kind.QUERY), b"last words")
    near.close()
    assert far.receive_bytes(far.receive_head(may_idle=True).payload_bytes) == b"last words"
    with pytest.raises(OSError, match="closed"):
        far.receive_head(may_idle=True)


def test_another_thread_can_end_an_idle_wait(ends: Ends) -> None:
    _, far = ends
    failures: list[OSError] = []

    def wait() -> None:
        try:
            far.receive_head(may_idle=True)
        except OSError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    far.shutdown()
    waiting.join(DEADLINE_S)
    assert len(failures) == 1


def test_idle_is_not_silent(address: str) -> None:
    """Waiting for a next message outlasts the deadline; waiting within one does not."""
    transport, timeout_s = transport_for(address), 0.1
    listener = transport.listen(address, timeout_s)
    near: list[Stream] = []
    connecting = threading.Thread(
        target=lambda: near.append(transport.connect(listener.address, DEADLINE_S))
    )
    connecting.start()
    far = listener.accept()
    is_late = threading.Timer(3 * timeout_s, lambda: near[0].send(Head(Kind.QUERY), b"late"))
    is_late.start()
    head = far.receive_head(may_idle=True)
    connecting.join()
    assert far.receive_bytes(head.payload_bytes) == b"late"
    socket_of(near[0]).sendall(Head(Kind.QUERY).pack()[:5])
    with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
        far.receive_head(may_idle=True)
    for end in (near[0], far, listener):
        end.close()


def test_nobody_there_is_an_os_error(socket_folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Transport().connect(f"unix:{socket_folder}/none", 1.0)
    listener = Transport().listen("tcp:127.0.0.1:0", 1.0)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        Transport().connect(listener.address, 1.0)
    with pytest.raises(OSError, match="not an address"):
        Transport().connect("nowhere", 1.0)


def test_tcp_sends_small_messages_at_once() -> None:
    listener = Transport().listen("tcp:127.0.0.1:0", 5.0)
    near = Transport().connect(listener.address, 5.0)
    sock = socket_of(near)
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert sock.gettimeout() is None
    near.close()
    listener.close()


def test_the_socket_file_of_a_killed_process_is_replaced(socket_folder: Path) -> None:
    path = socket_folder / "data"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    listener = Transport().listen(f"unix:{path}", 1.0)
    Transport().connect(f"unix:{path}", 1.0).close()
    listener.close()
    assert not path.exists()


def test_an_address_in_use_is_left_alone(address: str) -> None:
    transport = transport_for(address)
    listener = transport.listen(address, 1.0)
    with pytest.raises(ConfigError, match="in use"):
        transport.listen(listener.address, 1.0)
    listener.close()


def test_a_file_that_is_no_socket_is_left_alone(socket_folder: Path) -> None:
    path = socket_folder / "data"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        Transport().listen(f"unix:{path}", 1.0)
    assert path.read_text() == "precious"
