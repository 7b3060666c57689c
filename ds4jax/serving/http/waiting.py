"""While a model is loaded, which may take minutes: tell whoever asks to come again, and a supervisor that all is well."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hypercorn.asyncio import serve
from quart import Quart, Response, request

from ds4jax.serving.http import anthropic, anthropic_events, openai_common
from ds4jax.serving.http.app import PlainHTTP
from ds4jax.serving.http.edge import json_response
from ds4jax.serving.http.problems import SERVER, Problem
from ds4jax.serving.http.serve import BACKLOG, hypercorn_config

_RETRY_AFTER_S = 2
_GRACE_S = 1.0  # for answers under way, each of which is at hand


@contextmanager
def waiting_room(reserved: socket.socket) -> Iterator[None]:
    """Answer every request at a reserved address with 503 and Retry-After, `/live` with 200, until the block ends.

    In a thread of its own, for loading keeps the caller's. The address stays reserved, and listening: who connects between the end and
    the real server waits for it.
    """
    reserved.listen(BACKLOG)
    listener = reserved.dup()
    begun = threading.Event()
    stopping: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def answer() -> None:
        stop = asyncio.Event()
        stopping.append((asyncio.get_running_loop(), stop))
        begun.set()
        await serve(_app(), hypercorn_config(listener, _GRACE_S), shutdown_trigger=stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(answer(),), name="waiting room", daemon=True)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        loop, stop = stopping[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def _app() -> Quart:
    app = Quart("ds4jax", static_folder=None)
    app.asgi_app = PlainHTTP(app.asgi_app)  # type: ignore[method-assign]

    @app.before_request
    async def answer() -> Response:
        if request.path in ("/", "/live"):
            return json_response({"status": "ok"})
        if request.path in ("/ready", "/health"):
            response = json_response({"status": "loading"}, status=503)
        else:
            message = "the model is being loaded; try again in a few seconds, or ask /ready when it is there"
            shape = anthropic_events if request.path.startswith(anthropic.PREFIX) else openai_common
            response = json_response(shape.error_object(Problem(503, message, SERVER, code="loading")), status=503)
        response.headers["Retry-After"] = str(_RETRY_AFTER_S)
        return response

    return app
