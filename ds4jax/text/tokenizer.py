"""Text to token ids and back, with the vocabulary that a GGUF file carries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from ds4jax.errors import RequestError, TokenizerError
from ds4jax.text import special
from ds4jax.text.bpe import BYTE_OF_LETTER, build_encoder, build_model
from ds4jax.text.vocabulary import Vocabulary, check_kind, read_id, read_list


class Tokenizer:
    """Encode and decode with one byte-level BPE vocabulary.

    Two encoders share the merges: `encode` knows no added tokens, so text from users and tools can never turn into
    `<｜User｜>` or `</think>`; `encode_rendered` matches them first and is for text the server itself has rendered.
    Neither adds a BOS or EOS. Instances are immutable and safe to use from several threads.

    Args:
        tokens: one string an id; ordinary tokens in byte-letter form, added tokens as their literal.
        token_types: one GGUF type an id (1 normal, 3 control, 4 user-defined; 3 and 4 are added tokens).
        merges: "left right", most important first.
        bos_id, eos_id: ids of the tokens that open a prompt and end a turn.

    Raises TokenizerError when these do not fit together.
    """

    def __init__(self, tokens: Sequence[str], token_types: Sequence[int], merges: Sequence[str], bos_id: int, eos_id: int) -> None:
        self._vocabulary = vocabulary = Vocabulary(tuple(tokens), tuple(token_types), tuple(merges), bos_id, eos_id)
        self._added = vocabulary.added
        self._id_of = vocabulary.id_of
        model = build_model(vocabulary.id_of, vocabulary.merges)
        self._plain = build_encoder(model, added=())
        self._rendered = build_encoder(model, added=[vocabulary.tokens[i] for i in sorted(self._added)])

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from GGUF metadata (key -> Python value). Raises TokenizerError naming the key at fault."""
        check_kind(metadata)
        return cls(
            tokens=read_list(metadata, "tokens", str),
            token_types=read_list(metadata, "token_type", int),
            merges=read_list(metadata, "merges", str),
            bos_id=read_id(metadata, "bos_token_id"),
            eos_id=read_id(metadata, "eos_token_id"),
        )

    def encode(self, text: str) -> list[int]:
        """Encode text from outside: what looks like a special token stays text. Raises RequestError for a lone surrogate."""
        return _encode(self._plain, text)

    def encode_rendered(self, text: str) -> list[int]:
        """Encode text in which special literals are tokens. Never give it text from users or tools."""
        return _encode(self._rendered, text)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; special tokens show as their literals, bytes that are no UTF-8 as U+FFFD.

        Raises TokenizerError for an id out of range.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, often not whole characters. Raises TokenizerError for an id out of range.

        A token that is not written in byte letters (some files give placeholders the normal type) stands for its own text.
        """
        if not 0 <= token_id < self.n_vocab:
            raise TokenizerError(f"token id {token_id} is out of range; this vocabulary has ids 0 to {self.n_vocab - 1}")
        token = self._vocabulary.tokens[token_id]
        if token_id not in self._added:
            try:
                return bytes(BYTE_OF_LETTER[letter] for letter in token)
            except KeyError:
                pass
        return token.encode()

    def is_special(self, token_id: int) -> bool:
        """Whether an id is an added token, which `encode` never gives."""
        return token_id in self._added

    @property
    def special_literals(self) -> frozenset[str]:
        """The texts of all added tokens."""
        return frozenset(self._vocabulary.tokens[i] for i in self._added)

    def id_of(self, literal: str) -> int | None:
        """The id of an added token, or None where the vocabulary lacks it."""
        token_id = self._id_of.get(literal)
        return token_id if token_id in self._added else None

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token that `encode` can give: n bytes of text are at least n / this many tokens."""
        return max(len(self.token_bytes(i)) for i in range(self.n_vocab) if i not in self._added)

    @property
    def n_vocab(self) -> int:
        return len(self._vocabulary.tokens)

    @property
    def bos_id(self) -> int:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int:
        return self._vocabulary.eos_id

    @property
    def user_id(self) -> int | None:
        return self.id_of(special.USER)

    @property
    def assistant_id(self) -> int | None:
        return self.id_of(special.ASSISTANT)

    @property
    def think_id(self) -> int | None:
        return self.id_of(special.THINK)

    @property
    def end_think_id(self) -> int | None:
        return self.id_of(special.END_THINK)

    @property
    def dsml_id(self) -> int | None:
        return self.id_of(special.DSML)


def _encode(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        code = f"U+{ord(text[e.start]):04X}"
        raise RequestError(f"the text has a lone surrogate ({code}) at character {e.start}; send well-formed Unicode") from None
    # The batch call is the only one that skips computing offsets, which long prompts would pay for.
    ids: list[int] = encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
