"""`/tokenize` and `/detokenize`, in the spellings of the servers that have them. Nothing here asks the engine for work."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import msgspec
from quart import Blueprint, Response

from ds4jax.errors import RequestError
from ds4jax.serving.http import openai_chat, strict_json
from ds4jax.serving.http.conversation import Served
from ds4jax.serving.http.edge import Edge, json_response
from ds4jax.serving.http.prompts import check_ids
from ds4jax.text.tokenizer import Tokenizer


class TokenizeBody(msgspec.Struct):
    """The body of `/tokenize`: one of `prompt`, `content` and `messages`.

    add_special_tokens, add_special: whether raw text gets the BOS that `/v1/completions` gives it; by default a `prompt` does and
    a `content` does not. return_token_strs and with_pieces ask for the text of each token too.
    """

    prompt: str | None = None
    content: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_special: bool = False
    return_token_strs: bool = False
    with_pieces: bool = False


class DetokenizeBody(msgspec.Struct):
    """The body of `/detokenize`."""

    tokens: list[int]


def tokenize(data: bytes, served: Served) -> dict[str, Any]:
    """Encode text or a conversation as the server itself would. Raises RequestError naming the field at fault."""
    body = strict_json.decode(data, TokenizeBody)
    ids = _encode(body, data, served)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": served.n_ctx, "tokens": ids}
    if body.return_token_strs:
        reply["token_strs"] = [served.tokenizer.decode([i]) for i in ids]
    if body.with_pieces:
        reply["tokens"] = [{"id": i, "piece": _piece(served.tokenizer, i)} for i in ids]
    return reply


def detokenize(data: bytes, served: Served) -> dict[str, Any]:
    """Decode token ids; special tokens show as their literals. Raises RequestError naming an id that is out of range."""
    ids = strict_json.decode(data, DetokenizeBody).tokens
    check_ids(ids, "tokens", served.tokenizer)
    text = served.tokenizer.decode(ids)
    return {"prompt": text, "content": text}


def _encode(body: TokenizeBody, data: bytes, served: Served) -> list[int]:
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(f"prompt: got {' and '.join(given) or 'nothing'}; send one of prompt, content and messages", "prompt")
    if body.messages is not None:
        # The very reader of chat completions, so that its prompt is counted whatever fields shape it. What is too long is counted too.
        return list(openai_chat.read(data, replace(served, n_ctx=sys.maxsize)).requests[0].prompt)
    text, has_bos = (body.content, body.add_special) if body.prompt is None else (body.prompt, body.add_special_tokens)
    return [*([served.tokenizer.bos_id] if has_bos else []), *served.tokenizer.encode(text or "")]


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """The text of a token, or its bytes where they are no whole characters."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def blueprint(edge: Edge) -> Blueprint:
    """Build the routes over one edge."""
    routes = Blueprint("tokens", __name__)

    @routes.post("/tokenize")
    async def tokenize_text() -> Response:
        return json_response(await edge.read_body(lambda data: tokenize(data, edge.served)))

    @routes.post("/detokenize")
    async def detokenize_ids() -> Response:
        return json_response(await edge.read_body(lambda data: detokenize(data, edge.served)))

    return routes
