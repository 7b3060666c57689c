"""From a file name to a running engine: the part that `serve`, `generate`, `chat` and `precompile` share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ds4jax.cli.console import byte_progress, note
from ds4jax.cli.options import Backend
from ds4jax.cli.small_model import cache_dir, default_model
from ds4jax.config import EngineConfig
from ds4jax.errors import ConfigError

if TYPE_CHECKING:
    from ds4jax import Engine
    from ds4jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Numerics:
    """How the model computes. kv_quant: none, ds4 or auto; dtype: float32, bfloat16 or auto."""

    kv_quant: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("--kv-quant", self.kv_quant, ("none", "ds4", "auto")),
            ("--dtype", self.dtype, ("float32", "bfloat16", "auto")),
        ):
            if value not in allowed:
                raise ConfigError(f"{option}: got {value!r}, expected one of {', '.join(allowed)}")


@contextmanager
def open_engine(
    path: Path | None, config: EngineConfig, backend: Backend = "auto", gpu: int | None = None, numerics: Numerics | None = None
) -> Iterator[tuple[Engine, Tokenizer]]:
    """Load a model, compile its programs and yield (engine, tokenizer); the engine is closed at the end.

    The device is chosen first: it must be settled before anything touches JAX, and a missing one is better said before
    minutes of loading.
    """
    numerics = numerics or Numerics()
    # Before JAX is imported: programs compiled once are found again at the next start.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_dir() / "programs"))
    from ds4jax.serving.engine.backend import select_backend

    platform = select_backend(backend, gpu)
    if path is None:
        path = default_model()
        note(f"no model named: using a small one with random weights, {path}")

    from ds4jax import Engine, load_model

    with byte_progress(f"loading {path.name}") as progress:
        model = load_model(path, kv_quant=_kv_quant(numerics, path), dtype=_dtype(numerics, platform), progress=progress)
    note(f"{model.config.name} on {platform}; compiling for {config.slots} slots of {config.ctx} tokens")
    engine = Engine(model, config=config)
    try:
        yield engine, model.tokenizer
    finally:
        engine.close()


def _kv_quant(numerics: Numerics, path: Path) -> Literal["none", "ds4"]:
    """auto: the rounding that the trained model expects, where the shape has whole blocks for it."""
    if numerics.kv_quant == "none":
        return "none"
    if numerics.kv_quant == "ds4":
        return "ds4"
    from ds4jax.model.gguf.reader import GGUFFile

    config = GGUFFile(path).config
    return "ds4" if (config.head_dim - config.n_rot) % 64 == 0 and config.index_dim == 128 else "none"


def _dtype(numerics: Numerics, platform: str) -> Literal["float32", "bfloat16"]:
    """auto: bfloat16 where the hardware has it, float32 on a CPU, which emulates bfloat16 slowly."""
    if numerics.dtype == "float32" or (numerics.dtype == "auto" and platform == "cpu"):
        return "float32"
    return "bfloat16"
