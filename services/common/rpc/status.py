"""Carries the error tree over gRPC: status code plus trailing metadata, and back.

The server's interceptor writes it, `error_from_rpc` reads it on the caller's side.
"""

import grpc

from services.common.errors import (
    BY_CODE,
    DeadlineExceeded,
    InfiniteLLMError,
    InternalError,
    Unavailable,
)

CODE_KEY = "infinite-llm-code"
PARAM_KEY = "infinite-llm-param"


def status_of(error: InfiniteLLMError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_code]


def trailing_metadata_of(error: InfiniteLLMError) -> tuple[tuple[str, str], ...]:
    code = (CODE_KEY, error.code)
    return (code,) if error.param is None else (code, (PARAM_KEY, error.param))


def error_from_rpc(error: grpc.aio.AioRpcError) -> InfiniteLLMError:
    """The error that the other side raised, or what the transport says happened to the call.

    CANCELLED reads as Unavailable here: the peer stopped. A caller that cancels calls itself
    looks at `error.code()` first.
    """
    metadata = {str(key): value for key, value in error.trailing_metadata() or ()}
    code = metadata.get(CODE_KEY)
    if code is not None:
        param = metadata.get(PARAM_KEY)
        kind = BY_CODE.get(str(code), InternalError)
        return kind(error.details() or str(code), None if param is None else str(param))
    message = f"{error.code().name}: {error.details()}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return Unavailable(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message)
        case _:
            return InternalError(message)
