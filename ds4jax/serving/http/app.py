"""The Quart app: routes, errors and limits."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
from hypercorn.typing import ASGIReceiveCallable, ASGIReceiveEvent, ASGISendCallable, ASGISendEvent, HTTPScope, Scope
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
    app.asgi_app = PlainHTTP(ReleaseAtEnd(app.asgi_app, edge))  # type: ignore[method-assign]
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


class PlainHTTP:
    """ASGI middleware for what the framework leaves open: it refuses web sockets, and says so where a connection cannot be used again.

    Of web sockets the framework would look for their errors' handler, find that of requests, and fail. An answer that does not wait for
    the whole body ends the connection in HTTP/1; a client that is not told sends its next request there and gets none.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] == "websocket":
            await _refuse(receive, send)
        elif scope["type"] == "http" and scope["http_version"].startswith("1") and _has_body(scope):
            await self._app(scope, *_closing(receive, send))
        else:
            await self._app(scope, receive, send)


def _has_body(scope: HTTPScope) -> bool:
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in scope["headers"])


def _closing(receive: ASGIReceiveCallable, send: ASGISendCallable) -> tuple[ASGIReceiveCallable, ASGISendCallable]:
    whole = False

    async def hear() -> ASGIReceiveEvent:
        nonlocal whole
        event = await receive()
        whole = whole or (event["type"] == "http.request" and not event["more_body"])
        return event

    async def say(event: ASGISendEvent) -> None:
        if event["type"] == "http.response.start" and not whole:
            event["headers"] = [*event["headers"], (b"connection", b"close")]
        await send(event)

    return hear, say


async def _refuse(receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    body = orjson.dumps(openai_common.error_object(Problem(400, "this server has no web sockets; send a plain HTTP request")))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await receive()  # that it wants to be let in
    await send({"type": "websocket.http.response.start", "status": 400, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body, "more_body": False})
