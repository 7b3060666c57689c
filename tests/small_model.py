"""A model of two layers: the cheapest to compile that has experts by token, by score, and compressed rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ds4jax.cli.presets import TINY, vocabulary_of
from ds4jax.model.gguf.writer import write_synthetic

TWO_LAYERS = replace(
    TINY, name="two layers", n_layer=2, n_embd=64, n_ff=64, n_hash_layer=1, compress_ratios=(0, 4), swiglu_clamp=(10.0,) * 2,
    swiglu_clamp_shared=(10.0,) * 2,
)  # fmt: skip


def write_two_layers(path: Path) -> Path:
    """Write the model to a path and return it."""
    write_synthetic(path, TWO_LAYERS, "q8", 3, vocabulary_of(TWO_LAYERS))
    return path
