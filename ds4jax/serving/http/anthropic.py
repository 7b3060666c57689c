"""The routes of Anthropic's API."""

from __future__ import annotations

import sys
from dataclasses import replace

from quart import Blueprint, Response

from ds4jax.serving.http import anthropic_messages, reply_events, sse
from ds4jax.serving.http.anthropic_events import MessageEvents
from ds4jax.serving.http.call import Call
from ds4jax.serving.http.edge import Edge, json_response

PREFIX = "/v1/messages"
"""Errors under this path have Anthropic's shape."""


def blueprint(edge: Edge) -> Blueprint:
    """Build the routes over one edge."""
    routes = Blueprint("anthropic", __name__)

    def read(data: bytes) -> Call:
        return anthropic_messages.read(data, edge.served)

    def read_to_count(data: bytes) -> tuple[str | None, int]:
        # Clients count to see whether it fits, so there is no limit.
        return anthropic_messages.count_tokens(data, replace(edge.served, n_ctx=sys.maxsize))

    @routes.post(PREFIX)
    async def messages() -> Response:
        generation = await edge.start(read)
        writer = MessageEvents(generation)
        if generation.call.stream:
            return sse.response(reply_events.stream(generation, writer, edge.config.keepalive_s))
        await reply_events.complete(generation, writer, edge.config.keepalive_s)
        return json_response(writer.message())

    @routes.post(f"{PREFIX}/count_tokens")
    async def count_tokens() -> Response:
        model, n_tokens = await edge.read_body(read_to_count)
        edge.check_model(model)
        return json_response({"input_tokens": n_tokens})

    return routes
