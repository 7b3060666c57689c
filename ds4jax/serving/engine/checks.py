"""Refuse what cannot be packed for the device, before it stands in a batch with others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import SamplingParams

MOST = 2**31 - 1  # what an int32 field of a step holds


def check_tokens(tokens: Sequence[int], n_vocab: int, param: str) -> None:
    """Raise RequestError for an id outside the vocabulary: the device would quietly read another token's row."""
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise RequestError(f"{param}: got the id {token}, expected 0 to {n_vocab - 1}", param)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise RequestError naming a sampling field that no step could carry."""
    for name in ("temperature", "top_p", "min_p"):
        value = getattr(sampling, name)
        if not math.isfinite(value) or abs(value) > 3e38:
            raise RequestError(f"{name}: got {value}, expected a finite number of ordinary size", name)
    if not 0 <= sampling.top_k <= MOST:
        raise RequestError(f"top_k: got {sampling.top_k}, expected 0 to {MOST}", "top_k")
