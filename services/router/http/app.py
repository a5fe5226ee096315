"""The HTTP front door: which path is answered by what. Built by `__main__`, run by HttpServer."""

from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from services.router.http import errors
from services.router.http.routes import OpenAiRoutes
from services.router.http.schemas import ChatBody, CompletionBody, OpenAiBody
from services.router.http.telemetry import RequestTelemetry
from services.router.metrics import RouterMetrics
from services.router.readiness import Readiness


def create_app(routes: OpenAiRoutes, readiness: Readiness, metrics: RouterMetrics) -> FastAPI:
    app = FastAPI(title="Infinite-LLM", redirect_slashes=False)
    app.add_middleware(RequestTelemetry, metrics=metrics)
    errors.install(app)

    async def health() -> Response:
        """200 when at least one instance is ready."""
        ready = readiness.is_ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def live() -> Response:
        return JSONResponse({"live": True})

    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    _add_get(app, "/health", health)
    _add_get(app, "/live", live)
    _add_get(app, "/metrics", exposition)
    _add_get(app, "/v1/models", routes.models)
    _add_get(app, "/v1/models/{name:path}", routes.model)
    _add_post(app, "/v1/completions", routes.completions, CompletionBody)
    _add_post(app, "/v1/chat/completions", routes.chat_completions, ChatBody)
    return app


def _add_get(app: FastAPI, path: str, endpoint: Any) -> None:
    app.add_api_route(path, endpoint, methods=["GET"])
    # Load balancers probe with HEAD; the server leaves the body out.
    app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _add_post(app: FastAPI, path: str, endpoint: Any, body: type[OpenAiBody]) -> None:
    # The route reads its body itself (size, threads, error shape); this only documents it.
    schema = {"content": {"application/json": {"schema": body.model_json_schema()}}}
    extra = {"requestBody": {**schema, "required": True}}
    app.add_api_route(path, endpoint, methods=["POST"], openapi_extra=extra)
