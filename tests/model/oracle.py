"""The oracle sets: small models with the logits that other programs computed from them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
import pytest

from ds4jax import Engine
from ds4jax.config import EngineConfig
from ds4jax.model.cache import KVCache, init_cache
from ds4jax.model.model import Model, load_model
from ds4jax.model.steps import PrefillBatch, prefill_all_logits
from ds4jax.serving.engine.local import program_directory
from ds4jax.serving.engine.programs import ProgramStore

ROOT = Path(__file__).parents[2]
LENGTHS = (5, 130, 300, 600)
N_CTX = 640
# Largest difference of any logit (their standard deviation is 2.5) between float32 programs that sum in another order. An RMS
# epsilon of 1e-5 in place of 1e-6 already moves them by more.
TOLERANCE = 1.5e-4


@dataclass(frozen=True)
class Run:
    """One sequence of a set. logits: f32 [P, V] at int32 [P] positions; argmax: int32 [T], of every position."""

    tokens: list[int]
    positions: np.ndarray
    logits: np.ndarray
    argmax: np.ndarray

    def at(self, position: int) -> np.ndarray:
        """Return the reference logits [V] at a position that is kept."""
        (row,) = np.flatnonzero(self.positions == position)
        return self.logits[row]


@dataclass(frozen=True)
class OracleSet:
    """A model file and its right answers."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.path.with_suffix(".npz")) as arrays:
            return dict(arrays)

    def run(self, n: int) -> Run:
        """Return the sequence of n tokens."""
        a = self._arrays
        return Run(a[f"len{n}_tokens"].tolist(), a[f"len{n}_positions"], a[f"len{n}_logits"], a[f"len{n}_argmax"])

    def load(self, kv_quant: str = "none", dtype: str = "float32") -> Model:
        return load_model(self.path, kv_quant=kv_quant, dtype=dtype)


def _folders() -> list[Path]:
    """Where sets are: our own, and a folder of more sets if there is one (see CONTRIBUTING)."""
    more = os.environ.get("DS4JAX_ORACLE")
    return [ROOT / "tests" / "fixtures" / "oracle", *([Path(more)] if more else [])]


SETS = {path.stem: OracleSet(path) for folder in reversed(_folders()) for path in sorted(folder.glob("*.gguf"))}
SMOOTH = SETS["tiny-smooth"]
# Sets are held to two paths, a sequence as one chunk, and chunks and steps of an engine. To compile those of few bits takes long; what one
# of eight bits has in common with smooth is not compiled twice.
_SLOW, _SMOKE = pytest.mark.slow, pytest.mark.smoke
IN_ONE_CHUNK = [pytest.param(name, marks={"tiny-smooth": _SMOKE, "tiny-q2": _SLOW}.get(name, ())) for name in SETS]
SERVED = [pytest.param(name, marks=_SLOW if name in ("tiny-q2", "tiny-q4k") else ()) for name in SETS if name != "tiny-q8"]


class AllLogits:
    """A compiled chunk of up to n_token tokens that gives the logits after each of them."""

    def __init__(self, model: Model, n_token: int = N_CTX, n_ctx: int = N_CTX, options: dict[str, int | bool] | None = None) -> None:
        self.model, self.n_token, self.n_ctx = model, n_token, n_ctx
        spec = model.spec

        def run(leaves: Sequence[jax.Array], cache: KVCache, batch: PrefillBatch) -> tuple[jax.Array, KVCache]:
            return prefill_all_logits(model.flat.merge(leaves), cache, batch, spec.compute)

        lowered = jax.jit(run, donate_argnums=1).lower(model.flat.leaves, self.new_cache(), self._batch([0]))
        settings = [os.environ.get("XLA_FLAGS"), jax.config.values["jax_disable_most_optimizations"], options]
        name = hashlib.sha256((lowered.as_text() + str(settings)).encode()).hexdigest()[:24]
        path = program_directory() / f"all-logits-{name}-{jax.__version__}.xla"
        stored = ProgramStore._load(path) if path.is_file() else None
        self._program = stored or lowered.compile(compiler_options=options)
        if stored is None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            ProgramStore._save(path, self._program)

    def new_cache(self) -> KVCache:
        return init_cache(self.model.config, 1, self.n_ctx, self.model.spec.kv_quant, self.model.spec.dtype)

    def _batch(self, tokens: Sequence[int]) -> PrefillBatch:
        padded = np.zeros((1, self.n_token), np.int32)
        padded[0, : len(tokens)] = tokens
        return PrefillBatch(padded, np.zeros(1, np.int32), np.full(1, len(tokens), np.int32))  # type: ignore[arg-type]

    def __call__(self, tokens: Sequence[int], sizes: Sequence[int] | None = None) -> np.ndarray:
        """Feed tokens in one chunk, or in chunks of the given sizes: f32 [T, V]."""
        cache, first, out = self.new_cache(), 0, []
        for size in sizes or (len(tokens),):
            logits, cache = self._program(self.model.flat.leaves, cache, self._batch(tokens[first : first + size]))
            out.append(np.asarray(logits[0, :size]))
            first += size
        assert first == len(tokens)
        return np.concatenate(out)


# The slots decide the decode buckets: every one of 1, 2, 4, 8, 16 where compiling is cheapest.
N_SLOT = {"tiny-smooth": 16}
CHUNK = 64


def engine_config(name: str) -> EngineConfig:
    """Return how the tests serve a set. A long window makes sure that threads on a busy machine meet in one batch."""
    mixed = 16 if name == SMOOTH.name else CHUNK
    return EngineConfig(slots=N_SLOT.get(name, 2), ctx=N_CTX, coalesce_us=100_000, prefill_quantum=CHUNK, mixed_prefill_quantum=mixed)


def open_engine(name: str) -> Engine:
    """Load a set and open an engine over it."""
    return Engine(SETS[name].load(), config=engine_config(name))


def assert_exact(got: np.ndarray, run: Run) -> None:
    """Compare logits [T, V] of a whole sequence with the reference."""
    worst = np.abs(got[run.positions] - run.logits).max()
    assert worst <= TOLERANCE, f"logits differ by up to {worst:.1e}"
    np.testing.assert_array_equal(got.argmax(-1), run.argmax, "best tokens differ")
