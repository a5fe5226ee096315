import pytest

from services.common.errors import ConfigError
from services.worker.distattention.transport.address import (
    TcpAddress,
    UnixAddress,
    parse_address,
)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("unix:/tmp/a:b", UnixAddress("/tmp/a:b")),
        ("tcp:worker-0.workers:7000", TcpAddress("worker-0.workers", 7000)),
        ("tcp:[::1]:7000", TcpAddress("::1", 7000)),
        ("tls:worker-0.workers:7000", TcpAddress("worker-0.workers", 7000, "tls")),
        ("nixl:worker-0.workers:7000", TcpAddress("worker-0.workers", 7000, "nixl")),
    ],
)
def test_addresses_are_parsed(text: str, parsed: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == parsed
    assert str(parsed) == text


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
        "tls::80",
        "http://host:80",
        "/tmp/socket",
        "unix:/" + "x" * 200,
    ],
)
def test_what_is_no_address_says_so(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)
