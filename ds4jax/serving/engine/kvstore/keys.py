"""How a saved session is found: digests of beginnings.

A file is named by what it is good for: the model, the layout of its cache, and its tokens. So the name of the file that holds the
first n tokens of a prompt can be computed, and one pass over the prompt gives the names for every n that there is a file of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ds4jax.serving.engine.kvstore.format import hasher

KEY_BYTES = 20


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose state can be used here. Both are digests (or names) that the engine chooses.

    model: the weights, quantization included, because a state is exact only for those that made it. layout: the storage formats and
    the shapes of a row; not the number of slots or the context they hold, for a file has live rows alone.
    """

    model: str
    layout: str


def as_tokens(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return token ids as they are stored, uint32 [n]."""
    return np.ascontiguousarray(tokens, np.uint32)


def entry_key(identity: Identity, tokens: Sequence[int] | np.ndarray) -> str:
    """Return the key of the session that has exactly these tokens, 40 hexadecimal digits."""
    tokens = as_tokens(tokens)
    return prefix_keys(identity, tokens, [len(tokens)])[len(tokens)]


def prefix_keys(identity: Identity, tokens: np.ndarray, lengths: Iterable[int]) -> dict[int, str]:
    """Return the keys of the first n tokens (uint32 [N]) for every length n <= N."""
    digest = hashlib.blake2b(f"{identity.model}\n{identity.layout}\n".encode(), digest_size=KEY_BYTES)
    return _prefix_digests(digest, memoryview(tokens).cast("B"), lengths, tokens.itemsize)


def prefix_text_digests(text: bytes, lengths: Iterable[int]) -> dict[int, str]:
    """Return the digests of the first n bytes for every length n, as sections have them."""
    return _prefix_digests(hasher(), memoryview(text), lengths, 1)


def _prefix_digests(digest: hashlib.blake2b, data: memoryview, lengths: Iterable[int], item_bytes: int) -> dict[int, str]:
    found, done = {}, 0
    for length in sorted(set(lengths)):
        digest.update(data[done * item_bytes : length * item_bytes])
        found[length] = digest.copy().hexdigest()
        done = length
    return found
