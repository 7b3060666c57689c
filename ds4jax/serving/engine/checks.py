"""Refuse what cannot be packed for the device, before it stands in a batch with others."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import MOST_BIASES, MOST_LOGPROBS, Adjustments, SamplingParams

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
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MOST_LOGPROBS:
        raise RequestError(f"logprobs: got {sampling.logprobs}, expected 0 to {MOST_LOGPROBS}", "logprobs")


def check_adjustments(adjustments: Adjustments, n_vocab: int) -> None:
    """Raise RequestError naming an adjustment that no slot could hold, or that would leave no finite logit."""
    for name, least, most in (
        ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2), ("repetition_penalty", 0.01, 100), ("min_tokens", 0, MOST),
    ):  # fmt: skip
        value = getattr(adjustments, name)
        if not least <= value <= most:  # NaN is not either
            raise RequestError(f"{name}: got {value}, expected {least} to {most}", name)
    if len(adjustments.logit_bias) > MOST_BIASES:
        raise RequestError(f"logit_bias: got {len(adjustments.logit_bias)} tokens, expected at most {MOST_BIASES}", "logit_bias")
    for token, bias in adjustments.logit_bias:
        if not 0 <= token < n_vocab:
            raise RequestError(f"logit_bias: got the token id {token}, expected 0 to {n_vocab - 1}", "logit_bias")
        if not -100 <= bias <= 100:
            raise RequestError(f"logit_bias: got {bias} for the token {token}, expected -100 to 100", "logit_bias")
