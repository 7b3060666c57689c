"""Log probabilities of drawn tokens and of the best ones, by array code and by the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.model import scores
from ds4jax.model.kernels import top as kernels
from ds4jax.serving.engine.api import TokenLogprobs
from ds4jax.serving.engine.batch import read_scores
from tests.model.lowering import lower_for_cuda

_score = jax.jit(scores.score)


def twin(logits: np.ndarray, token: int, n_top: int) -> TokenLogprobs:
    x = logits.astype(np.float64)
    x = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.argsort(-x, kind="stable")[:n_top]
    return TokenLogprobs(float(x[token]), tuple((int(i), float(x[i])) for i in order))


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([7, 24, 300]), st.integers(0, scores.TOP), st.booleans())
def test_scores_are_the_models_own(seed: int, v: int, n_top: int, has_equals: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (3, v)).astype(np.float32)
    if has_equals:
        logits = np.round(logits) + 0.0  # no -0, which top_k sets below 0
    token = rng.integers(0, v, 3).astype(np.int32)
    rows = np.asarray(_score(logits, token, np.array([False, True, False])))
    for row in range(3):
        got, want = read_scores(rows[row], n_top), twin(logits[row], token[row], n_top)
        assert [i for i, _ in got.top] == [i for i, _ in want.top]
        np.testing.assert_allclose([got.logprob, *(x for _, x in got.top)], [want.logprob, *(x for _, x in want.top)], atol=2e-5)


def test_nobody_asks_and_nothing_is_computed() -> None:
    logits = jnp.full((2, 30), jnp.nan)
    assert not np.asarray(_score(logits, np.zeros(2, np.int32), np.zeros(2, bool))).any()


@pytest.mark.parametrize("n", [20, 2048, 5000])
def test_the_kernel_finds_what_top_k_finds(n: int) -> None:
    x = np.random.default_rng(n).normal(size=(3, n)).astype(np.float32)
    x[1] = np.round(x[1]) + 0.0  # many equals; no -0, which top_k sets below 0
    x[2] = 0.25
    value, place = kernels.top(x, np.array([True, True, True]), 20)
    expected_value, expected_place = jax.lax.top_k(x, 20)
    np.testing.assert_array_equal(value, expected_value)
    np.testing.assert_array_equal(place, expected_place)


def test_the_kernel_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shapes = [
        jax.ShapeDtypeStruct((64, 129280), jnp.float32),
        jax.ShapeDtypeStruct((64,), jnp.int32),
        jax.ShapeDtypeStruct((64,), jnp.bool_),
    ]
    text = lower_for_cuda(monkeypatch, scores.score, *shapes)
    assert "top" in text
    assert "stablehlo.case" not in text and "stablehlo.sort" not in text
