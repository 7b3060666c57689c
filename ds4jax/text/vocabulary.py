"""The vocabulary lists of a GGUF file, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from ds4jax.errors import TokenizerError
from ds4jax.text.bpe import BYTE_OF_LETTER
from ds4jax.text.special import ALWAYS_ADDED

T = TypeVar("T")

CONTROL, USER_DEFINED = 3, 4

# Names that GGUF files give to the one way of splitting in bpe.py (V4 kept that of V3).
SPLITTERS = ("joyai-llm", "deepseek-v3")

# Letters of bytes that occur in no UTF-8 text; a vocabulary may lack them.
_UNUSED_BYTES = {0xC0, 0xC1, *range(0xF5, 0x100)}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and merges that fit together.

    The checks buy two promises: every text can be encoded without loss, and merging ordinary text never gives an added token.
    Raises TokenizerError.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_id: int
    eos_id: int

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.types) != n:
            raise TokenizerError(f"tokenizer.ggml.token_type: got {len(self.types)} entries, expected one for each of {n} tokens")
        for name, token_id in (("bos_token_id", self.bos_id), ("eos_token_id", self.eos_id)):
            if not 0 <= token_id < n:
                raise TokenizerError(f"tokenizer.ggml.{name}: got {token_id}, expected an id below {n}")
        if len(self.id_of) != n:
            first, token = next((i, token) for i, token in enumerate(self.tokens) if self.id_of[token] != i)
            raise TokenizerError(f"tokenizer.ggml.tokens: {token!r} is there twice, as {first} and {self.id_of[token]}; ids must be unique")
        missing = [f"{b:#04x}" for letter, b in BYTE_OF_LETTER.items() if letter not in self.id_of and b not in _UNUSED_BYTES]
        if missing:
            raise TokenizerError(f"tokenizer.ggml.tokens: no token for byte {', '.join(missing)}; this is not a byte-level vocabulary")
        self._check_merges()

    def _check_merges(self) -> None:
        for rank, merge in enumerate(self.merges):
            left, _, right = merge.partition(" ")
            if not left or not right or " " in right:
                raise TokenizerError(f"tokenizer.ggml.merges: entry {rank} is {merge!r}, expected two tokens with one space between")
            for token in (left, right, left + right):
                token_id = self.id_of.get(token)
                if token_id is None:
                    raise TokenizerError(f"tokenizer.ggml.merges: entry {rank} is {merge!r}, but {token!r} is not in tokenizer.ggml.tokens")
                if token_id in self.added:
                    raise TokenizerError(f"tokenizer.ggml.merges: entry {rank} is {merge!r}; it must not touch the special token {token!r}")

    @cached_property
    def id_of(self) -> dict[str, int]:
        """token -> id."""
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def added(self) -> frozenset[int]:
        """Ids of tokens that are matched by their literal and never merged."""
        named = zip(self.tokens, self.types, strict=True)
        return frozenset(i for i, (token, kind) in enumerate(named) if kind in (CONTROL, USER_DEFINED) or token in ALWAYS_ADDED)


def check_kind(metadata: Mapping[str, Any]) -> None:
    """Reject vocabularies that merge or split otherwise than this package does. Raises TokenizerError naming the key."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model: got {model!r}, expected 'gpt2' (byte-level BPE); is this a DeepSeek V4 file?")
    splitter = metadata.get("tokenizer.ggml.pre", SPLITTERS[0])
    if splitter not in SPLITTERS:
        raise TokenizerError(f"tokenizer.ggml.pre: got {splitter!r}, expected one of {SPLITTERS}; is this a DeepSeek V4 file?")


def read_list(metadata: Mapping[str, Any], key: str, kind: type[T]) -> tuple[T, ...]:
    """Read `tokenizer.ggml.<key>`, a list of one kind of entry. Raises TokenizerError naming the key."""
    full = f"tokenizer.ggml.{key}"
    value = metadata.get(full)
    if value is None:
        raise TokenizerError(f"{full}: the file lacks this key; expected a list. Is it a complete DeepSeek V4 GGUF?")
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TokenizerError(f"{full}: got {type(value).__name__}, expected a list of {kind.__name__}")
    entries = tuple(value)
    for i, entry in enumerate(entries):
        if not isinstance(entry, kind):
            raise TokenizerError(f"{full}: entry {i} is {entry!r}, expected {kind.__name__}")
    return entries


def read_id(metadata: Mapping[str, Any], key: str) -> int:
    """Read `tokenizer.ggml.<key>`, a token id. Raises TokenizerError naming the key."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, int) or isinstance(value, bool):
        raise TokenizerError(f"tokenizer.ggml.{key}: got {value!r}, expected a token id. Is it a complete DeepSeek V4 GGUF?")
    return value
