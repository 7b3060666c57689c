"""The Quart app: routes, errors and limits."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from quart import Quart, Response, request

from ds4jax.config import ServerConfig
from ds4jax.serving.engine.api import EngineClient
from ds4jax.serving.http import anthropic, anthropic_events, openai, openai_common, openapi, responses, status, tokens
from ds4jax.serving.http.access import add_access
from ds4jax.serving.http.edge import Edge, ReleaseAtEnd, json_response
from ds4jax.serving.http.problems import INTERNAL, Problem, describe
from ds4jax.text.dsml import ReplayMemory
from ds4jax.text.tokenizer import Tokenizer

log = logging.getLogger("ds4jax.http")

EDGE = "ds4jax"
"""Where an app keeps its Edge among `app.extensions`."""


def create_app(engine: EngineClient, tokenizer: Tokenizer, config: ServerConfig, memory: ReplayMemory | None = None) -> Quart:
    """Build the ASGI app over an engine that is running already; the app neither starts nor stops it.

    memory: of the calls of tools, where it is shared.
    """
    edge = Edge(engine, tokenizer, config, memory)
    app = Quart("ds4jax", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.body_limit_bytes
    app.extensions[EDGE] = edge
    app.asgi_app = NoWebSockets(ReleaseAtEnd(app.asgi_app, edge))  # type: ignore[method-assign]
    app.register_blueprint(openai.blueprint(edge))
    app.register_blueprint(anthropic.blueprint(edge))
    app.register_blueprint(responses.blueprint(edge))
    app.register_blueprint(tokens.blueprint(edge))
    app.register_blueprint(status.blueprint(edge))
    app.register_blueprint(openapi.blueprint(edge))
    add_access(app, config.api_keys, cors=config.cors)
    _add_errors(app, config.body_limit_bytes)

    @app.while_serving
    async def lifespan() -> AsyncGenerator[None, None]:
        yield
        edge.abort_all()

    return app


def _add_errors(app: Quart, body_limit_bytes: int) -> None:
    """Answer every error in the API's own shape, those of the framework included."""

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        problem = describe(error, body_limit_bytes=body_limit_bytes)
        if problem.status >= 500:
            unexpected = problem.code == INTERNAL  # the others say themselves what went wrong
            log.error("%s %s failed: %s", request.method, request.path, error, exc_info=error if unexpected else None)
        shape = anthropic_events if request.path.startswith(anthropic.PREFIX) else openai_common
        response = json_response(shape.error_object(problem), status=problem.status)
        response.headers.update(problem.headers)
        return response


class NoWebSockets:
    """ASGI middleware that refuses web sockets; the framework would look for their errors' handler, find that of requests, and fail."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        body = orjson.dumps(openai_common.error_object(Problem(400, "this server has no web sockets; send a plain HTTP request")))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await receive()  # that it wants to be let in
        await send({"type": "websocket.http.response.start", "status": 400, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": body, "more_body": False})
