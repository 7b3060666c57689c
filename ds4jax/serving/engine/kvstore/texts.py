"""What tokens read as, so that a session is found by its text where a prompt was cut into other tokens than the model wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SPECIAL = b"\xff"
"""Stands before the text of a special token. No text from outside has this byte, so none can pass for a special token."""


@dataclass(frozen=True)
class Reading:
    """The text of some tokens. ends: where in it each of them ends, int64 [n]."""

    text: bytes
    ends: np.ndarray

    def n_tokens_of(self, n_text: int) -> int | None:
        """Return how many tokens the first n_text bytes are; None where they end within one."""
        index = int(np.searchsorted(self.ends, n_text))
        return index + 1 if index < len(self.ends) and self.ends[index] == n_text else None


class TokenTexts:
    """The text of every token of a vocabulary: `texts`, by id.

    texts: the bytes of each. special: the ids of special tokens.
    """

    def __init__(self, texts: Sequence[bytes], special: frozenset[int]) -> None:
        self.texts = [SPECIAL + text if i in special else text for i, text in enumerate(texts)]
        self._lengths = np.array([len(text) for text in self.texts], np.int64)

    def read(self, tokens: Sequence[int]) -> Reading:
        """Return the text of tokens."""
        return Reading(b"".join(map(self.texts.__getitem__, tokens)), np.cumsum(self._lengths[np.asarray(tokens, np.int64)]))
