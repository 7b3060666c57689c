"""The routes of OpenAI's API."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, Response

from ds4jax.serving.http import openai_chat, openai_completions, sse
from ds4jax.serving.http.call import Call, ModelNotFoundError
from ds4jax.serving.http.edge import Edge, json_response
from ds4jax.serving.http.openai_common import stream_body

SUPPORTED_PARAMETERS = (
    "tools", "tool_choice", "parallel_tool_calls",
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "stream", "reasoning_effort",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "n",
    "response_format", "structured_outputs",
)  # fmt: skip


def blueprint(edge: Edge) -> Blueprint:
    """Build the routes over one edge."""
    routes = Blueprint("openai", __name__)

    def read_chat(data: bytes) -> Call:
        return openai_chat.read(data, edge.served)

    def read_completion(data: bytes) -> Call:
        return openai_completions.read(data, edge.served)

    @routes.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        generation = await edge.start(read_chat)
        if not generation.call.stream:
            return json_response(await openai_chat.reply(generation, edge.config.keepalive_s))
        return sse.response(stream_body(generation, openai_chat.ChatChunks(generation), edge.config.keepalive_s))

    @routes.post("/v1/completions")
    async def completions() -> Response:
        generation = await edge.start(read_completion)
        if not generation.call.stream:
            return json_response(await openai_completions.reply(generation, edge.config.keepalive_s))
        return sse.response(stream_body(generation, openai_completions.CompletionChunks(generation), edge.config.keepalive_s))

    @routes.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(edge, model_id) for model_id in edge.served_models]})

    @routes.get("/v1/models/<path:model_id>")
    async def model(model_id: str) -> Response:
        if model_id not in edge.served_models:
            raise ModelNotFoundError(model_id, edge.served_models)
        return json_response(_model(edge, model_id))

    return routes


def _model(edge: Edge, model_id: str) -> dict[str, Any]:
    """Describe the loaded model under one of its ids. Clients look for its context length under different names."""
    n_ctx = edge.engine.n_ctx
    limits = {"context_length": n_ctx, "max_completion_tokens": min(edge.config.default_max_tokens, n_ctx), "is_moderated": False}
    return {
        "id": model_id,
        "object": "model",
        "created": edge.created,
        "owned_by": "ds4jax",
        "name": edge.config.model_id,
        "context_length": n_ctx,
        "max_model_len": n_ctx,
        "top_provider": limits,
        "supported_parameters": SUPPORTED_PARAMETERS,
    }
