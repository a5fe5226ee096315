import socket
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.worker.distattention.address import (
    TcpAddress,
    UnixAddress,
    bound_address,
    close_listener,
    connect,
    listen,
    parse_address,
)


def test_addresses_are_parsed() -> None:
    assert parse_address("unix:/tmp/a:b") == UnixAddress("/tmp/a:b")
    assert parse_address("tcp:worker-0.workers:7000") == TcpAddress("worker-0.workers", 7000)
    assert parse_address("tcp:[::1]:7000") == TcpAddress("::1", 7000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "tcp:",
        "tcp:host",
        "tcp:host:",
        "tcp:host:-1",
        "tcp:host:99999",
        "tcp::80",
        "http://host:80",
        "/tmp/socket",
        "unix:/" + "x" * 200,
    ],
)
def test_what_is_no_address_says_so(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)


def test_a_message_crosses(address: str) -> None:
    listener = listen(address)
    near = connect(bound_address(listener), 5.0)
    far, _ = listener.accept()
    near.sendall(b"block")
    assert far.recv(5, socket.MSG_WAITALL) == b"block"
    for sock in (near, far):
        sock.close()
    close_listener(listener)


def test_tcp_sends_small_messages_at_once() -> None:
    listener = listen("tcp:127.0.0.1:0")
    with connect(bound_address(listener), 5.0) as near:
        assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert near.gettimeout() is None
    close_listener(listener)


def test_nobody_there_is_an_os_error(socket_folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(f"unix:{socket_folder}/none", 1.0)
    listener = listen("tcp:127.0.0.1:0")
    address = bound_address(listener)
    close_listener(listener)
    with pytest.raises(ConnectionRefusedError):
        connect(address, 1.0)


def test_the_socket_file_of_a_killed_process_is_replaced(socket_folder: Path) -> None:
    address = f"unix:{socket_folder}/data"
    listen(address).close()
    assert (socket_folder / "data").exists()
    listener = listen(address)
    connect(address, 1.0).close()
    close_listener(listener)
    assert not (socket_folder / "data").exists()


def test_an_address_in_use_is_left_alone(address: str) -> None:
    listener = listen(address)
    with pytest.raises(ConfigError, match="in use"):
        listen(bound_address(listener))
    connect(bound_address(listener), 1.0).close()
    close_listener(listener)


def test_a_file_that_is_no_socket_is_left_alone(socket_folder: Path) -> None:
    path = socket_folder / "data"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        listen(f"unix:{path}")
    assert path.read_text() == "precious"
