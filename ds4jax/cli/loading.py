"""From a file name to a running engine: the part that `serve`, `generate`, `chat` and `precompile` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds4jax.cli.console import byte_progress, note, program_progress
from ds4jax.cli.options import Backend
from ds4jax.config import EngineConfig, KVPolicy, ModelConfig
from ds4jax.errors import ConfigError
from ds4jax.packaged import small_model

if TYPE_CHECKING:
    from ds4jax import Engine, Model
    from ds4jax.model.spec import ModelSpec
    from ds4jax.serving.engine.memory import MemoryPlan
    from ds4jax.text.dsml import ReplayMemory
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

    def resolve(self, config: ModelConfig) -> tuple[str, str]:
        """Return (kv_quant, dtype) for a model on this machine's device.

        auto means the rounding that the trained model expects, where the shape has room for it, and the type that the
        hardware multiplies best.
        """
        from ds4jax.model.model import default_dtype
        from ds4jax.model.spec import fits_ds4_rows

        kv_quant = self.kv_quant
        if kv_quant == "auto":
            kv_quant = "ds4" if fits_ds4_rows(config) else "none"
        return kv_quant, default_dtype() if self.dtype == "auto" else self.dtype


@dataclass(frozen=True)
class KVDisk:
    """Where sessions are kept on disk, which of them, and the memory of the calls of tools that goes along."""

    folder: Path
    policy: KVPolicy
    memory: ReplayMemory


@contextmanager
def open_engine(
    path: Path | None,
    config: EngineConfig,
    backend: Backend = "auto",
    gpu: int | None = None,
    numerics: Numerics | None = None,
    *,
    early: bool = False,
    random: str | None = None,
    layers: int | None = None,
    disk: KVDisk | None = None,
) -> Iterator[tuple[Engine, Tokenizer]]:
    """Load a model, compile its programs and yield (engine, tokenizer); the engine is closed at the end.

    early: as for `Engine`: yield before all buckets are compiled.
    random, layers: weights as of `open_model`. disk: where sessions outlive the engine.

    The device is chosen first: it must be settled before anything touches JAX, and a missing one is better said before
    minutes of loading.
    """
    from ds4jax.serving.engine.backend import select_backend

    platform = select_backend(backend, gpu)

    from ds4jax import Engine

    model = open_model(path, random, layers, numerics or Numerics())
    note(f"{model.config.name} on {platform}, {model.spec.dtype}")
    note("getting programs: those not kept from an earlier start are compiled, a few seconds each")
    with program_progress() as on_program:
        engine = Engine(
            model, config=config, on_plan=lambda plan: note(describe_plan(plan)), on_program=on_program, early=early,
            kv_disk=disk.folder if disk else None, kv_policy=disk.policy if disk else None, memory=disk.memory if disk else None,
        )  # fmt: skip
    if engine.compiling:
        note("the other batch sizes are compiled meanwhile")
    try:
        yield engine, model.tokenizer
    finally:
        engine.close()


def open_model(path: Path | None, random: str | None, layers: int | None, numerics: Numerics) -> Model:
    """Load a file, the small model of the package if none is named, or make random weights.

    Args:
        random: PRESET or PRESET-QUANT, such as flash-q2, instead of a file.
        layers: only the first so many of them; for random weights alone.

    Raises ConfigError where the arguments contradict each other, and whatever loading raises.
    """
    if random is not None:
        from ds4jax.cli.random_model import random_model

        if path is not None:
            raise ConfigError("--model and --random both name weights; give one of them")
        return random_model(random, layers, numerics)
    if layers is not None:
        raise ConfigError("--layers cuts random weights; name them with --random, such as --random flash-q2")
    from ds4jax import load_model
    from ds4jax.model.gguf.reader import GGUFFile

    path = choose_path(path)
    kv_quant, dtype = numerics.resolve(GGUFFile(path).config)
    with byte_progress(f"loading {path.name}") as progress:
        return load_model(path, kv_quant=kv_quant, dtype=dtype, progress=progress)


def read_spec(path: Path, numerics: Numerics) -> ModelSpec:
    """Describe a file's model without loading its weights."""
    from ds4jax.model import model
    from ds4jax.model.gguf.reader import GGUFFile

    file = GGUFFile(path)
    return model.read_spec(file, *numerics.resolve(file.config))


def choose_path(path: Path | None) -> Path:
    """Return the path, or that of the small model of the package if there is none."""
    if path is None:
        path = small_model()
        note("no model named: taking the small one that comes with the package")
    return path


def describe_plan(plan: MemoryPlan) -> str:
    """Say in one line what the memory of an engine goes to."""
    from ds4jax.cli.console import human_bytes

    slots = f"{plan.n_slot} slot{'s' * (plan.n_slot > 1)} of {plan.n_ctx} tokens"
    of_device = "" if plan.available_bytes is None else f" of {human_bytes(plan.available_bytes)} free"
    return (
        f"memory: {human_bytes(plan.total_bytes)}{of_device} (weights {human_bytes(plan.weight_bytes)}, "
        f"{slots} {human_bytes(plan.cache_bytes)}, snapshots {human_bytes(plan.snapshot_bytes)}, scratch {human_bytes(plan.scratch_bytes)})"
    )
