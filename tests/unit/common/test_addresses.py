"""Host and port notation, and ports of this machine."""

import socket

import pytest

from services.common.addresses import (
    free_ports,
    is_port_free,
    split_addresses,
    split_host_port,
)
from services.common.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("worker-0.workers:9000", ("worker-0.workers", 9000)),
        ("[::1]:0", ("::1", 0)),
    ],
)
def test_host_and_port_are_split(address: str, expected: tuple[str, int]) -> None:
    assert split_host_port(address) == expected


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:65536", "host:-1"])
def test_anything_else_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        split_host_port(address)


def test_several_addresses_are_separated_by_commas() -> None:
    assert split_addresses("a:1") == ("a:1",)
    assert split_addresses("a:1, b:2") == ("a:1", "b:2")


@pytest.mark.parametrize("addresses", ["", "a:1,", "a:1,b"])
def test_a_list_with_anything_else_is_refused(addresses: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        split_addresses(addresses)


def test_free_ports_are_distinct_and_free() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_port_free("127.0.0.1", port) for port in ports)


def test_a_port_with_a_listener_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not is_port_free("127.0.0.1", server.getsockname()[1])
