"""`/v1/completions`: raw text in, its continuation out, no chat template. No I/O."""

from __future__ import annotations

from typing import Any

from ds4jax.config import ServerConfig
from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.http import openai_common as common
from ds4jax.serving.http import strict_json
from ds4jax.serving.http.call import Call, new_id
from ds4jax.serving.http.generation import Generation, Piece
from ds4jax.serving.http.params import CommonBody, completion_limit
from ds4jax.serving.http.prompts import check_ids, encode_text
from ds4jax.serving.http.unsupported import reject_unsupported
from ds4jax.text.tokenizer import Tokenizer


class CompletionBody(CommonBody, kw_only=True):
    """The body of a text completion request. A list of strings, or of lists of ids, asks for one choice each."""

    prompt: str | list[str | int | list[int]]


def read(data: bytes, tokenizer: Tokenizer, n_ctx: int, config: ServerConfig) -> Call:
    """Read a body into a call. Raises RequestError or ContextLengthError naming the field at fault."""
    body = strict_json.decode(data, CompletionBody)
    reject_unsupported(body)
    sampling, stop_token_ids = body.sampling(), body.stop_tokens(tokenizer, tokenizer.eos_id)
    requests = []
    for ids in _prompts(body.prompt, tokenizer, n_ctx):
        max_tokens = completion_limit(
            "max_tokens", body.max_tokens, n_prompt=len(ids), n_ctx=n_ctx, default=config.default_max_tokens, param="prompt"
        )
        requests.append(GenerateRequest(ids, max_tokens, sampling, stop_token_ids, body.adjustments(tokenizer, max_tokens)))
    return Call(
        endpoint="completions",
        id=new_id("cmpl"),
        model=body.model or config.model_id,
        requests=requests,
        stop_strings=body.stop_strings,
        stream=bool(body.stream),
        include_usage=body.include_usage,
    )


async def reply(generation: Generation, check_s: float) -> dict[str, Any]:
    """Wait for the reply of a call that does not stream."""
    choices = []
    for index, (text, ending) in enumerate(await common.collect(generation, check_s)):
        choice = {"text": text["content"], "index": index, "finish_reason": ending.reason}
        choices.append(choice | common.ending_error(ending) if ending.reason == "error" else choice)
    return {**common.head(generation, "text_completion"), "choices": choices, "usage": common.usage(generation)}


class CompletionChunks:
    """The chunks of a text stream; those of several choices mingle."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._head = common.head(generation, "text_completion")

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """Word what a piece adds."""
        chunks = [self._chunk(piece.index, delta.text) for delta in piece.deltas]
        if piece.ending is not None and piece.ending.reason != "error":
            chunks.append(self._chunk(piece.index, "", piece.ending.reason))
        return chunks

    def usage(self) -> dict[str, Any]:
        """Word the chunk that carries the usage."""
        return {**self._head, "choices": [], "usage": common.usage(self._generation)}

    def _chunk(self, index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return {**self._head, "choices": [{"text": text, "index": index, "finish_reason": finish_reason}]}


def _prompts(prompt: str | list[str | int | list[int]], tokenizer: Tokenizer, n_ctx: int) -> list[tuple[int, ...]]:
    """Read every form of prompt as token ids. Ids are taken as they are."""
    if isinstance(prompt, str):
        return [encode_text(prompt, tokenizer, n_ctx, "prompt")]
    if not prompt:
        raise RequestError("prompt: the list is empty; send text, token ids, or a list of either", "prompt")
    if all(isinstance(item, int) for item in prompt):
        return [_checked(prompt, "prompt", tokenizer)]
    prompts = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            prompts.append(encode_text(item, tokenizer, n_ctx, "prompt"))
        elif isinstance(item, list):
            prompts.append(_checked(item, f"prompt[{i}]", tokenizer))
        else:
            raise RequestError(f"prompt[{i}]: a token id among texts; send ids as a list of their own", f"prompt[{i}]")
    return prompts


def _checked(ids: list[Any], place: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not ids:
        raise RequestError(f"{place}: got no tokens, expected at least one", place)
    check_ids(ids, place, tokenizer)
    return tuple(ids)
