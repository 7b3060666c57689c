"""Prompts to token ids, where one that can never fit is refused before the work of encoding it."""

from __future__ import annotations

from collections.abc import Sequence

from ds4jax.errors import ContextLengthError, RequestError
from ds4jax.text.segments import Segment, Text, to_ids
from ds4jax.text.tokenizer import Tokenizer


def encode_chat(segments: Sequence[Segment], tokenizer: Tokenizer, n_ctx: int, param: str) -> tuple[int, ...]:
    """Encode a rendered conversation. Raises ContextLengthError naming `param` if its text is too long to fit for certain."""
    _check_length(sum(len(segment.text) for segment in segments if isinstance(segment, Text)), tokenizer, n_ctx, param)
    return tuple(to_ids(segments, tokenizer))


def shared_beginnings(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tell how many leading tokens of a conversation others are likely to share: those before its first user turn, system and tools."""
    user_id = tokenizer.user_id
    return (ids.index(user_id),) if user_id in ids else ()


def encode_text(text: str, tokenizer: Tokenizer, n_ctx: int, param: str) -> tuple[int, ...]:
    """Encode raw text, which starts a document and so gets a BOS. Raises ContextLengthError as `encode_chat` does."""
    _check_length(len(text), tokenizer, n_ctx, param)
    return (tokenizer.bos_id, *tokenizer.encode(text))


def check_ids(ids: Sequence[int], place: str, tokenizer: Tokenizer) -> None:
    """Raise RequestError naming the first token id that the vocabulary does not have."""
    for i, token_id in enumerate(ids):
        if not 0 <= token_id < tokenizer.n_vocab:
            at = f"{place}[{i}]"
            raise RequestError(f"{at}: token id {token_id} is out of range; this vocabulary has 0 to {tokenizer.n_vocab - 1}", at)


def _check_length(n_characters: int, tokenizer: Tokenizer, n_ctx: int, param: str) -> None:
    """Refuse text that would not fit even if every token were the longest there is: encoding megabytes takes seconds of a core."""
    n_least = -(-n_characters // tokenizer.longest_token_bytes)  # a character has at least one byte
    if n_least >= n_ctx:
        raise ContextLengthError(n_ctx, n_least, None, param, at_least=True)
