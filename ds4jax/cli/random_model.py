"""Random weights in a published shape, made on the device: what is measured where no file of that size is at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds4jax.cli.console import note
from ds4jax.cli.loading import Numerics

if TYPE_CHECKING:
    from ds4jax import Model


def random_model(name: str, layers: int | None, numerics: Numerics) -> Model:
    """Make a model of PRESET or PRESET-QUANT, such as flash-q2, with a learnt vocabulary that is filled up with placeholders.

    Args:
        layers: only the first so many of them.

    Raises ConfigError for a shape or a quant that does not exist.
    """
    from ds4jax.cli.presets import shape_of, vocabulary_of
    from ds4jax.model.gguf.random_leaves import random_leaves, random_spec
    from ds4jax.model.model import Model
    from ds4jax.text.tokenizer import Tokenizer

    preset, quant = split_name(name)
    config = shape_of(preset, layers)
    spec = random_spec(config, quant, *numerics.resolve(config))
    v = vocabulary_of(config)
    note(f"making random weights: {config.name}, {config.n_layer} layers, {quant}")
    return Model(spec, random_leaves(spec, quant), Tokenizer(v.tokens, v.types, v.merges, v.bos_id, v.eos_id))


def split_name(name: str) -> tuple[str, str]:
    """Return (preset, quant) of what --random names."""
    preset, _, quant = name.partition("-")
    return preset, quant or "q8"
