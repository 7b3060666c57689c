"""The routes of OpenAI's Responses API."""

from __future__ import annotations

from typing import cast

import orjson
from quart import Blueprint, Response

from ds4jax.serving.http import reply_events, responses_body, sse
from ds4jax.serving.http.edge import Edge, json_response
from ds4jax.serving.http.responses_body import ResponseCall
from ds4jax.serving.http.responses_events import ResponseEvents
from ds4jax.serving.http.responses_store import ResponseStore, StoredResponse
from ds4jax.serving.http.responses_thoughts import HiddenThoughts


def blueprint(edge: Edge) -> Blueprint:
    """Build the routes over one edge; they share a store of finished responses, and the thoughts that were not shown."""
    routes = Blueprint("responses", __name__)
    store, hidden = ResponseStore(), HiddenThoughts()

    def read(data: bytes) -> ResponseCall:
        return responses_body.read(data, edge.served, store, hidden)

    def keep(call: ResponseCall, ended: StoredResponse) -> None:
        if call.is_kept:
            store.put(call.id, ended)
        if not call.has_reasoning_item:
            hidden.remember(call.instructions, ended.messages)

    @routes.post("/v1/responses")
    async def create() -> Response:
        generation = await edge.start(read)
        writer = ResponseEvents(generation, cast(ResponseCall, generation.call), keep)
        if generation.call.stream:
            return sse.response(reply_events.stream(generation, writer, edge.config.keepalive_s))
        await reply_events.complete(generation, writer, edge.config.keepalive_s)
        return json_response(writer.response())

    @routes.get("/v1/responses/<response_id>")
    async def retrieve(response_id: str) -> Response:
        return json_response(orjson.Fragment(store.get(response_id, "response_id").response))

    @routes.delete("/v1/responses/<response_id>")
    async def delete(response_id: str) -> Response:
        store.delete(response_id, "response_id")
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes
