"""Host and port notation, and free ports of this machine."""

import socket

from services.common.errors import ConfigError


def split_host_port(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`; raises ConfigError naming the address."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def split_addresses(addresses: str) -> tuple[str, ...]:
    """`host:port`, or several of them separated by commas; raises ConfigError."""
    parts = tuple(part.strip() for part in addresses.split(","))
    for part in parts:
        split_host_port(part)
    return parts


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_ports(num_ports: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports that nobody listens on. Held together, so that none is given twice."""
    probes = [socket.socket() for _ in range(num_ports)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
