"""The Quart app: routes, errors, CORS and limits."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from quart import Quart, Response, request

from ds4jax.config import ServerConfig
from ds4jax.serving.engine.api import EngineClient
from ds4jax.serving.http import openai
from ds4jax.serving.http.edge import Edge, ReleaseAtEnd, json_response
from ds4jax.serving.http.openai_common import error_object
from ds4jax.serving.http.problems import describe
from ds4jax.serving.metrics import CONTENT_TYPE
from ds4jax.text.tokenizer import Tokenizer

log = logging.getLogger("ds4jax.http")

EDGE = "ds4jax"
"""Where an app keeps its Edge among `app.extensions`."""

CORS_HEADERS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*",
}


def create_app(engine: EngineClient, tokenizer: Tokenizer, config: ServerConfig) -> Quart:
    """Build the ASGI app over an engine that is running already; the app neither starts nor stops it."""
    edge = Edge(engine, tokenizer, config)
    app = Quart("ds4jax")
    app.config["MAX_CONTENT_LENGTH"] = config.body_limit_bytes
    app.extensions[EDGE] = edge
    app.asgi_app = ReleaseAtEnd(app.asgi_app, edge)  # type: ignore[method-assign]
    app.register_blueprint(openai.blueprint(edge))
    _add_operations(app, edge)
    _add_errors(app, config.body_limit_bytes)
    _add_options(app, cors=config.cors)

    @app.while_serving
    async def lifespan() -> AsyncGenerator[None, None]:
        yield
        edge.abort_all()

    return app


def _add_operations(app: Quart, edge: Edge) -> None:
    """Add what operators ask for."""

    @app.get("/health")
    async def health() -> Response:
        alive, stats = edge.engine.alive(), edge.engine.stats()
        slots = {"n_slots": stats.n_slots, "n_ctx": stats.n_ctx, "n_running": stats.n_running, "n_waiting": stats.n_waiting}
        return json_response({"status": "ok" if alive else "engine stopped", **slots}, status=200 if alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(edge.metrics.render(), content_type=CONTENT_TYPE)


def _add_errors(app: Quart, body_limit_bytes: int) -> None:
    """Answer every error in the API's own shape, those of the framework included."""

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        problem = describe(error, body_limit_bytes=body_limit_bytes)
        if problem.status >= 500:
            log.error("%s %s failed", request.method, request.path, exc_info=error)
        response = json_response(error_object(problem), status=problem.status)
        response.headers.update(problem.headers)
        return response


def _add_options(app: Quart, *, cors: bool) -> None:
    """Answer OPTIONS on any path, and let browsers of other origins in if asked to."""

    @app.before_request
    async def preflight() -> Response | None:
        return Response(status=204) if request.method == "OPTIONS" else None

    if cors:

        @app.after_request
        async def allow_all_origins(response: Response) -> Response:
            response.headers.update(CORS_HEADERS)
            return response
