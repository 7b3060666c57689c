"""The model that is measured: one from a file, or random weights in a published shape made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4jax.cli.loading import Numerics, open_model
from ds4jax.cli.random_model import split_name

if TYPE_CHECKING:
    from ds4jax import Model
    from ds4jax.model.spec import ModelSpec


@dataclass(frozen=True)
class Subject:
    """What is measured. quant: of the routed experts, "q2", "q4", "q8" or the types themselves; random: nobody reads its answers."""

    model: Model
    quant: str
    random: bool


def open_subject(path: Path | None, random: str | None, layers: int | None, numerics: Numerics) -> Subject:
    """Load or make the model that is measured; arguments and errors as of `open_model`."""
    model = open_model(path, random, layers, numerics)
    if random is not None:
        return Subject(model, split_name(random)[1], random=True)
    return Subject(model, quant_of(model.spec), random=False)


def quant_of(spec: ModelSpec) -> str:
    """Name the quant of the last layer's routed experts, as `synth --quant` spells it where it can."""
    from ds4jax.model.gguf.layout import EXPERT_KINDS

    kinds = dict(spec.kinds)
    gate, down = (kinds[f"blk.{spec.config.n_layer - 1}.ffn_{part}_exps.weight"] for part in ("gate", "down"))
    return next((quant for quant, pair in EXPERT_KINDS.items() if pair == (gate, down)), gate if gate == down else f"{gate}+{down}")
