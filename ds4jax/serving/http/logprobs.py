"""Log probabilities beside the text of a reply, as OpenAI's two APIs write them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds4jax.serving.engine.api import Token, TokenLogprobs
from ds4jax.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for the logarithm of zero, which JSON cannot write


@dataclass(frozen=True, slots=True)
class Scored:
    """A token's bytes and log probability, None where it follows nothing. top: the same of the best tokens, likeliest first.

    start, end: characters of the text before it, and up to its end, a character that it begins counted whole.
    is_content: whether any of its text is part of the answer; the text of thoughts, tags, calls and stop strings is not.
    """

    data: bytes
    logprob: float | None
    top: Sequence[tuple[bytes, float]]
    start: int
    end: int
    is_content: bool = False


def scored(event: Token, logprobs: TokenLogprobs, tokenizer: Tokenizer, start: int, end: int) -> Scored:
    """Put bytes in the place of ids."""
    top = [(tokenizer.token_bytes(token), logprob) for token, logprob in logprobs.top]
    return Scored(tokenizer.token_bytes(event.token), logprobs.logprob, top, start, end)


def chat_logprobs(tokens: Sequence[Scored]) -> dict[str, Any]:
    """Write the `logprobs` of a chat choice. A token that is no whole text shows U+FFFD; its bytes are exact."""
    return {"content": token_entries(tokens), "refusal": None}


def token_entries(tokens: Sequence[Scored]) -> list[dict[str, Any]]:
    """Write tokens one by one, each with the best ones in its place."""
    return [{**_entry(t.data, t.logprob), "top_logprobs": [_entry(*best) for best in t.top]} for t in tokens]


def completion_logprobs(tokens: Sequence[Scored]) -> dict[str, Any]:
    """Write the `logprobs` of a text choice, where each token's alternatives have itself among them."""
    return {
        "tokens": [_name(t.data) for t in tokens],
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "top_logprobs": [_best(t) for t in tokens],
        "text_offset": [t.start for t in tokens],
    }


def _best(token: Scored) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    return {_name(data): _finite(logprob) for data, logprob in (*token.top, (token.data, token.logprob))}


def _entry(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _name(data: bytes) -> str:
    """Name a token where its bytes have no field of their own: as text, or its bytes spelled out where they are no whole text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
