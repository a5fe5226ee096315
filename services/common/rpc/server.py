"""Makes gRPC servers whose handlers may simply raise from the error tree.

Every handler is an `async def` (unary) or an async generator (stream). One interceptor opens a
span for the call, as a child of the caller's, and turns what the handler raises into a status.
"""

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc

from services.common.errors import InfiniteLLMError, InternalError
from services.common.rpc.options import MAX_MESSAGE_BYTES, SERVER_OPTIONS
from services.common.rpc.status import status_of, trailing_metadata_of
from services.common.trace_context import span_of_call

_log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
UnaryBehaviour: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
StreamBehaviour: TypeAlias = Callable[[Any, Context], AsyncGenerator[Any, None]]


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_request_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server without port or services; the caller adds them, starts and stops it.

    `interceptors` may return handlers that raise from the error tree, too.
    """
    options = dict(SERVER_OPTIONS) | {"grpc.max_receive_message_length": max_request_bytes}
    return grpc.aio.server(interceptors=[_Border(), *interceptors], options=list(options.items()))


class _Border(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        method = handler_call_details.method
        if handler.unary_unary is not None:
            unary = _guard_unary(handler.unary_unary, method)
            return grpc.unary_unary_rpc_method_handler(unary, **codec)
        stream = _guard_stream(handler.unary_stream, method)
        return grpc.unary_stream_rpc_method_handler(stream, **codec)


def _guard_unary(behaviour: UnaryBehaviour, method: str) -> UnaryBehaviour:
    async def guarded(request: Any, context: Context) -> Any:
        async with _border(context, method):
            return await behaviour(request, context)

    return guarded


def _guard_stream(behaviour: StreamBehaviour | UnaryBehaviour, method: str) -> UnaryBehaviour:
    # A coroutine that writes, not a generator: a cancelled call then always surfaces in here, and
    # the handler's own clean-up has run before the call is over.
    async def guarded(request: Any, context: Context) -> None:
        async with _border(context, method):
            responses = behaviour(request, context)
            if not isinstance(responses, AsyncGenerator):  # it writes to the context itself
                await responses
                return
            async with contextlib.aclosing(responses):
                async for response in responses:
                    await context.write(response)

    return guarded


@contextlib.asynccontextmanager
async def _border(context: Context, method: str) -> AsyncIterator[None]:
    carrier = {
        str(key): value
        for key, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    }
    try:
        with span_of_call(method.lstrip("/"), carrier):
            yield
    except grpc.aio.AbortError:
        raise
    except InfiniteLLMError as error:
        await _abort(context, error)
    except Exception as error:
        _log.exception("unexpected error in %s", method)
        await _abort(context, InternalError(f"{type(error).__name__} in {method}"))


async def _abort(context: Context, error: InfiniteLLMError) -> None:
    await context.abort(status_of(error), error.message, trailing_metadata_of(error))
