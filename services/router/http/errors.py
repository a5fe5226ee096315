"""Every error as an OpenAI body, whoever raised it. Installed by the app."""

import logging
import math
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from services.common.errors import (
    ClientError,
    InfiniteLLMError,
    InternalError,
    Overloaded,
    Unauthenticated,
)
from services.router.http.disconnect import ClientDisconnected

#: An instance that was starting is usually there again.
RETRY_AFTER_S = 1.0

#: nginx's word for a client that left; only our own metrics see it.
STATUS_CLIENT_CLOSED = 499

_log = logging.getLogger(__name__)


class BodyTooLarge(ClientError):
    http_status = 413
    code = "body_too_large"


class BodyTooSlow(ClientError):
    http_status = 408
    code = "body_too_slow"


class NotFound(ClientError):
    http_status = 404
    code = "not_found"


class MethodNotAllowed(ClientError):
    http_status = 405
    code = "method_not_allowed"


def error_body(error: InfiniteLLMError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: InfiniteLLMError) -> JSONResponse:
    headers = {}
    if error.is_retryable:
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else RETRY_AFTER_S
        headers["Retry-After"] = str(math.ceil(retry_after_s))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), error.http_status, headers)


def install(app: FastAPI) -> None:
    app.add_exception_handler(InfiniteLLMError, _on_own_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnected, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, InfiniteLLMError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Wrong routes and methods, which the framework raises."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    kind = MethodNotAllowed if error.status_code == 405 else NotFound
    response = error_response(kind(f"there is no {what} here"))
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=STATUS_CLIENT_CLOSED)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    _log.error("unexpected error", exc_info=error)
    return error_response(InternalError("internal error"))
