"""Opens channels to other services and passes the caller's trace context along with each call."""

from collections.abc import Callable
from typing import Any

import grpc

from services.common.rpc.options import DEAD_AFTER_S, client_options
from services.common.trace_context import current_trace

#: A health probe or another question that is answered from memory.
PROBE_DEADLINE_S = 2.0
#: One control-plane call: register, heartbeat, reserve, release.
CONTROL_DEADLINE_S = 5.0


def open_channel(
    address: str,
    dead_after_s: float = DEAD_AFTER_S,
    credentials: grpc.ChannelCredentials | None = None,
) -> grpc.aio.Channel:
    """A channel to `host:port` that connects lazily; the caller closes it.

    `dead_after_s`: calls end with UNAVAILABLE when the peer's process answers no pings for so long.
    `credentials`: for TLS.
    """
    interceptors = [_TraceUnaryUnary(), _TraceUnaryStream()]
    options = client_options(dead_after_s)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


def _with_trace(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *current_trace().items())
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


class _TraceUnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_with_trace(client_call_details), request)


class _TraceUnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(_with_trace(client_call_details), request)
