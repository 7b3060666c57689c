"""The held-out texts that come with the package: prompts and answers of which training has seen none."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from random import Random

from ds4jax.text.chat import Message


@cache
def held_out_pairs() -> tuple[tuple[str, str], ...]:
    """Return (prompt, text) pairs."""
    lines = files("ds4jax.evals").joinpath("held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple((row["prompt"], row["text"]) for row in map(json.loads, lines))


def held_out_chats(n: int) -> list[tuple[Message, Message]]:
    """Return the first n pairs as chats of two turns."""
    return [(Message("user", prompt), Message("assistant", text)) for prompt, text in held_out_pairs()[:n]]


def held_out_filler(rng: Random, n_chars: int) -> str:
    """Return about n_chars characters of held-out texts, cut behind a sentence."""
    parts: list[str] = []
    while sum(map(len, parts)) < n_chars:
        parts.append(rng.choice(held_out_pairs())[1])
    text = "\n\n".join(parts)[: n_chars + 1]
    return text[: text.rfind(".") + 1]
