"""Asks for a key on every gRPC method but health, in the metadata `authorization`."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health

from services.common.errors import InfiniteLLMError
from services.router.access.account import Account
from services.router.access.key_file import KeyFile

_OPEN = f"/{health.SERVICE_NAME}/"


class GrpcGuard(grpc.aio.ServerInterceptor):
    """Stands inside the interceptor that turns errors into statuses."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        try:
            account = self._keys.account_of(_text(metadata.get("authorization")))
        except InfiniteLLMError as error:
            return grpc.unary_unary_rpc_method_handler(_raising(error))
        handler = await continuation(handler_call_details)
        # Reflection streams both ways and runs nothing that would be limited.
        if handler is None or handler.request_streaming:
            return handler
        return _within(handler, account)


def _text(value: str | bytes | None) -> str | None:
    return value if isinstance(value, str) else None


def _raising(error: InfiniteLLMError) -> Callable[[Any, Any], Awaitable[Any]]:
    async def refuse(request: Any, context: Any) -> Any:
        raise error

    return refuse


def _within(handler: Any, account: Account) -> Any:
    """For methods that are coroutines, as all of ours are; streams write to the context.

    Streams generate, and have limits; a client at its limit may still abort.
    """

    async def unary(request: Any, context: Any) -> Any:
        with account.named():
            return await handler.unary_unary(request, context)

    async def stream(request: Any, context: Any) -> Any:
        with account.enter():
            return await handler.unary_stream(request, context)

    codec = handler.request_deserializer, handler.response_serializer
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(unary, *codec)
    return grpc.unary_stream_rpc_method_handler(stream, *codec)
