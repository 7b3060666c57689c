"""The model that is measured: one from a file, or random weights in a published shape made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4jax.cli.console import byte_progress, note
from ds4jax.cli.loading import Numerics, choose_path
from ds4jax.errors import ConfigError

if TYPE_CHECKING:
    from ds4jax import Model
    from ds4jax.config import ModelConfig
    from ds4jax.model.spec import ModelSpec


@dataclass(frozen=True)
class Subject:
    """What is measured. quant: of the routed experts, "q2", "q4", "q8" or the types themselves; random: nobody reads its answers."""

    model: Model
    quant: str
    random: bool


def open_subject(path: Path | None, random: str | None, layers: int | None, numerics: Numerics) -> Subject:
    """Load a file, or make random weights.

    Args:
        random: PRESET or PRESET-QUANT, such as flash-q2, instead of a file.
        layers: only the first so many of them; for random weights alone.

    Raises ConfigError where the arguments contradict each other, and whatever loading raises.
    """
    if random is not None:
        if path is not None:
            raise ConfigError("--model and --random both name weights; give one of them")
        return _make_random(random, layers, numerics)
    if layers is not None:
        raise ConfigError("--layers cuts random weights; name them with --random, such as --random flash-q2")
    from ds4jax import load_model
    from ds4jax.model.gguf.reader import GGUFFile

    path = choose_path(path)
    kv_quant, dtype = numerics.resolve(GGUFFile(path))
    with byte_progress(f"loading {path.name}") as progress:
        model = load_model(path, kv_quant=kv_quant, dtype=dtype, progress=progress)
    return Subject(model, quant_of(model.spec), random=path == _default_path())


def _default_path() -> Path:
    from ds4jax.cli.small_model import default_model

    return default_model()


def _make_random(name: str, layers: int | None, numerics: Numerics) -> Subject:
    from ds4jax.cli.presets import shape_of, vocabulary_of
    from ds4jax.model.gguf.random_leaves import random_leaves, random_spec
    from ds4jax.model.model import Model
    from ds4jax.text.tokenizer import Tokenizer

    preset, _, quant = name.partition("-")
    quant = quant or "q8"
    config = shape_of(preset, layers)
    spec = random_spec(config, quant, *_resolve(numerics, config))
    v = vocabulary_of(config)
    note(f"making random weights: {config.name}, {config.n_layer} layers, {quant}")
    return Subject(Model(spec, random_leaves(spec, quant), Tokenizer(v.tokens, v.types, v.merges, v.bos_id, v.eos_id)), quant, random=True)


def _resolve(numerics: Numerics, config: ModelConfig) -> tuple[str, str]:
    """Choose (kv_quant, dtype) where no file is: as `Numerics.resolve`."""
    from ds4jax.model.model import default_dtype
    from ds4jax.model.spec import fits_ds4_rows

    kv_quant, dtype = numerics.kv_quant, numerics.dtype
    if kv_quant == "auto":
        kv_quant = "ds4" if fits_ds4_rows(config) else "none"
    return kv_quant, default_dtype() if dtype == "auto" else dtype


def quant_of(spec: ModelSpec) -> str:
    """Name the quant of the last layer's routed experts, as `synth --quant` spells it where it can."""
    from ds4jax.model.gguf.layout import EXPERT_KINDS

    kinds = dict(spec.kinds)
    gate, down = (kinds[f"blk.{spec.config.n_layer - 1}.ffn_{part}_exps.weight"] for part in ("gate", "down"))
    return next((quant for quant, pair in EXPERT_KINDS.items() if pair == (gate, down)), gate if gate == down else f"{gate}+{down}")
