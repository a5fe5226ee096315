"""The HTTP front door: which path is answered by what. Built by `__main__`, run by HttpServer."""

from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from services.router.access.http_guard import HttpGuard
from services.router.access.key_file import KeyFile
from services.router.http import errors
from services.router.http.chat import ChatBody
from services.router.http.open_requests import OpenRequests
from services.router.http.openapi import request_of, responses_of
from services.router.http.routes import OpenAiRoutes
from services.router.http.schemas import CompletionBody
from services.router.http.telemetry import RequestTelemetry
from services.router.http.tokens import DetokenizeBody, TokenizeBody, TokenRoutes
from services.router.metrics import RouterMetrics
from services.router.readiness import Readiness

_JSON, _EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Routes:
    openai: OpenAiRoutes
    tokens: TokenRoutes


@dataclass(frozen=True, slots=True)
class Door:
    """Who may come in, and how many at once."""

    keys: KeyFile | None
    """None: everybody."""
    max_requests: int


def create_app(routes: Routes, readiness: Readiness, metrics: RouterMetrics, door: Door) -> FastAPI:
    app = FastAPI(title="Infinite-LLM", redirect_slashes=False)
    # The last one added is asked first.
    if door.keys is not None:
        app.add_middleware(HttpGuard, keys=door.keys)
    app.add_middleware(OpenRequests, max_requests=door.max_requests)
    app.add_middleware(RequestTelemetry, metrics=metrics)
    errors.install(app)

    async def health() -> Response:
        """200 when at least one instance is ready."""
        ready = readiness.is_ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def version() -> Response:
        return JSONResponse({"version": metadata.version("infinite-llm")})

    async def live() -> Response:
        return JSONResponse({"live": True})

    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    _add_get(app, "/health", health)
    _add_get(app, "/ready", health)
    _add_get(app, "/live", live)
    _add_get(app, "/version", version)
    _add_get(app, "/metrics", exposition, "text/plain")
    _add_get(app, "/v1/models", routes.openai.models)
    _add_get(app, "/v1/models/{name:path}", routes.openai.model)
    name = routes.openai.model_name
    completion, chat = request_of(CompletionBody, name), request_of(ChatBody, name)
    _add_post(app, "/v1/completions", routes.openai.completions, completion, _EVENTS)
    _add_post(app, "/v1/chat/completions", routes.openai.chat_completions, chat, _EVENTS)
    _add_post(app, "/tokenize", routes.tokens.tokenize, request_of(TokenizeBody, name))
    _add_post(app, "/detokenize", routes.tokens.detokenize, request_of(DetokenizeBody, name))
    return app


def _add_get(app: FastAPI, path: str, endpoint: Any, media_type: str = _JSON) -> None:
    answers = responses_of(media_type)
    app.add_api_route(path, endpoint, methods=["GET"], responses=answers, response_class=Response)
    # Load balancers probe with HEAD; the server leaves the body out.
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _add_post(
    app: FastAPI, path: str, endpoint: Any, body: dict[str, Any], *media_types: str
) -> None:
    # The route reads its body itself (size, threads, error shape); this only documents it.
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        openapi_extra=body,
        responses=responses_of(_JSON, *media_types),
        response_class=Response,
    )
