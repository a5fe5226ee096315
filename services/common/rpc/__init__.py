"""gRPC as every service uses it: channels, servers, and the error tree on the wire."""

from services.common.rpc.channel import (
    CONTROL_DEADLINE_S,
    PROBE_DEADLINE_S,
    open_channel,
)
from services.common.rpc.server import new_server
from services.common.rpc.status import error_from_rpc

__all__ = [
    "CONTROL_DEADLINE_S",
    "PROBE_DEADLINE_S",
    "error_from_rpc",
    "new_server",
    "open_channel",
]
