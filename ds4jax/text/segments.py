"""A prompt as a list of segments, so that special tokens come from the renderer alone: whatever a text says, it is encoded as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from ds4jax.errors import TokenizerError
from ds4jax.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text; special literals in it stay text."""

    text: str


@dataclass(frozen=True, slots=True)
class Special:
    """One special token, by its literal."""

    literal: str


Segment = Text | Special


def to_ids(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Encode a prompt. Raises TokenizerError if the vocabulary lacks a special token, RequestError for a lone surrogate.

    Special tokens part the text into spans that are encoded one by one, so a longer conversation starts with the very ids of
    the shorter one, and the cache of a slot can be used again.
    """
    ids: list[int] = []
    for segment in join_texts(segments):
        if isinstance(segment, Text):
            ids += tokenizer.encode(segment.text)
            continue
        token_id = tokenizer.id_of(segment.literal)
        if token_id is None:
            raise TokenizerError(f"the vocabulary has no special token {segment.literal}; is this a DeepSeek V4 file?")
        ids.append(token_id)
    return ids


def to_text(segments: Iterable[Segment]) -> str:
    """Show a prompt to people. Encoding this text again would honour literals in messages: use `to_ids`."""
    return "".join(s.text if isinstance(s, Text) else s.literal for s in segments)


def join_texts(segments: Iterable[Segment]) -> list[Segment]:
    """Join neighbouring texts, since a merge may cross their border, and drop empty ones."""
    joined: list[Segment] = []
    for is_text, run in groupby(segments, lambda s: isinstance(s, Text)):
        if not is_text:
            joined += run
        elif text := to_text(run):
            joined.append(Text(text))
    return joined
