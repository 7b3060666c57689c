"""The training forward is the model that is served: same weights, same logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from ds4jax.cli.vocabulary import learn_vocabulary
from ds4jax.model.gguf.layout import ds4_tensors
from ds4jax.model.gguf.writer import as_stored, write_weights
from ds4jax.model.hyper import sinkhorn
from ds4jax.model.model import load_model
from tools.train_small.attend import Sequences
from tools.train_small.forward import hidden, logits
from tools.train_small.mixing import LARGEST_LOGIT, combination, excess
from tools.train_small.shapes import SMOKE
from tools.train_small.weights import build_model

N_TOKEN, N_PADDED = 300, 384
F32 = jnp.dtype(jnp.float32)


@cache
def weights() -> dict[str, np.ndarray]:
    """Random weights that a Q8_0 file holds without loss, as wide as those of synthetic models."""
    rng = np.random.default_rng(0)
    drawn = {}
    for spec in ds4_tensors(SMOKE, "q8"):
        if spec.kind == "I32":
            drawn[spec.name] = rng.random((SMOKE.n_vocab, SMOKE.n_expert)).argsort(axis=1)[:, : spec.shape[1]].astype(np.int32)
            continue
        stored = as_stored(spec, (rng.standard_normal(spec.shape) * spec.std + spec.mean).astype(np.float32))
        packed = spec.kind not in ("F32", "F16")
        plain = quants.dequantize(stored, GGMLQuantizationType[spec.kind]).reshape(spec.shape) if packed else stored
        drawn[spec.name] = plain.astype(np.float32)
    return drawn


@cache
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, SMOKE.n_vocab, N_TOKEN).astype(np.int32)


@partial(jax.jit, static_argnames="rounded")
def run_twin(given: dict[str, jax.Array], token: jax.Array, start: jax.Array, reach: jax.Array, rounded: bool) -> jax.Array:
    model = build_model(SMOKE, given)
    return logits(model, hidden(model, token, Sequences(start, rounded, reach), F32)[0], F32)


def twin(windows: Sequence[np.ndarray], begins: Sequence[int] = (), reach: Sequence[int] = (), *, rounded: bool = False) -> np.ndarray:
    """Logits [B, T, V] of the training forward. begins: where a second conversation begins in each window, 0 for none."""
    token, start = np.zeros((2, 4, N_PADDED), np.int32)  # one shape, so one program
    far = np.full(4, SMOKE.n_window, np.int32)
    far[: len(reach)] = reach
    for i, window in enumerate(windows):
        token[i, : len(window)] = window
    for i, begin in enumerate(begins):
        start[i, begin:] = begin
    given = {name: jnp.asarray(w) for name, w in weights().items()}
    return np.asarray(run_twin(given, jnp.asarray(token), jnp.asarray(start), jnp.asarray(far), rounded))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("twin") / "twin.gguf"
    write_weights(path, SMOKE, "q8", weights(), learn_vocabulary(SMOKE.n_vocab), {"general.license": "mit"})
    return path


def test_logits_are_those_of_the_served_model(path: Path) -> None:
    served = load_model(path, kv_quant="none", dtype="float32").logits(tokens())
    np.testing.assert_allclose(twin([tokens()])[0, :N_TOKEN], served, atol=1e-3)


@pytest.mark.slow
def test_rows_are_rounded_as_a_cache_rounds_them(path: Path) -> None:
    served = load_model(path, kv_quant="ds4", dtype="float32").logits(tokens())
    off = np.abs(twin([tokens()], rounded=True)[0, :N_TOKEN] - served)
    # A number on the border between two codes may fall either way, and moves what follows.
    assert np.quantile(off, 0.99) < 5e-3
    assert off.max() < 0.1


def test_conversations_in_a_window_do_not_see_each_other() -> None:
    first, second = tokens()[:128], tokens()[128:256]
    both = np.concatenate([first, second])
    parted, joined, first_alone, second_alone = twin([both, both, first, second], [128])
    np.testing.assert_allclose(parted[:128], first_alone[:128], atol=1e-4)
    np.testing.assert_allclose(parted[128:256], second_alone[:128], atol=2e-3)  # rotations by other angles round differently
    assert np.abs(joined[128:256] - second_alone[:128]).max() > 0.1  # unless nothing parts them


@pytest.mark.parametrize("size", [1.0, 30.0])  # the iterations are far from their limit where logits are large
def test_gradient_of_the_combination_is_that_of_its_iterations(size: float) -> None:
    rng = np.random.default_rng(2)
    z, g = (jnp.asarray(rng.standard_normal((64, 4, 4)) * by, jnp.float32) for by in (size, 1.0))
    exact, ours = (jax.jit(jax.grad(lambda z, f=f: jnp.sum(f(z, 20, 1e-6) * g)))(z) for f in (sinkhorn, combination))
    np.testing.assert_allclose(ours, exact, rtol=1e-3, atol=1e-5)


def test_only_logits_that_are_too_large_are_held_down() -> None:
    z = jnp.zeros((2, 4, 4)).at[0, 1, 2].set(LARGEST_LOGIT).at[1, 0, 0].set(-LARGEST_LOGIT - 3)
    assert excess(z) == 9 / 2
    np.testing.assert_array_equal(jnp.argwhere(jax.grad(excess)(z)), [[1, 0, 0]])


def test_a_short_reach_is_a_short_window() -> None:
    whole, short = twin([tokens(), tokens()], reach=[SMOKE.n_window, 16])[:2]
    np.testing.assert_allclose(whole[:16], short[:16], atol=1e-4)
    assert not np.allclose(whole[64:N_TOKEN], short[64:N_TOKEN], atol=1e-2)
