"""Kernels of routed experts against decoding and multiplying rounded activations, and that they lower for a GPU at Flash's shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.model import moe, quant
from ds4jax.model.quant.kernels import experts
from ds4jax.model.quant.kernels.activations import Int8Rows, quantize_rows
from tests.model.lowering import lower_for_cuda
from tests.model.test_quant import random_weight

L, E, X, D, F, CLAMP = 2, 5, 3, 512, 256, 7.0
LAYER = np.int32([1])


def rounded(x: np.ndarray) -> np.ndarray:
    """What int8 with a scale for 32 makes of x [M, K]."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    q = np.round(groups * np.float32(127) / np.where(largest == 0, 1, largest))
    return (q * largest * np.float32(1 / 127)).reshape(x.shape)


def unpack(rows: Int8Rows, k: int) -> np.ndarray:
    words = np.asarray(rows.words).reshape(len(rows.words), 8, k // 32).transpose(0, 2, 1)
    return words.copy().view(np.int8).reshape(len(words), k)


def test_activations_round_to_the_nearest_and_keep_their_sums() -> None:
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    x[1, 32:64] = 0
    rows = quantize_rows(jnp.asarray(x))
    q = unpack(rows, 256).astype(np.float32)
    np.testing.assert_allclose(q.reshape(3, 8, 32) * np.asarray(rows.scale)[:, :, None], rounded(x).reshape(3, 8, 32), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(rows.sums).reshape(3, 2, 8), q.reshape(3, 8, 2, 16).sum(axis=3).transpose(0, 2, 1))


def test_nan_taints_its_group_alone() -> None:
    x = jnp.ones((1, 64)).at[0, 40].set(jnp.nan)
    np.testing.assert_array_equal(np.isnan(quantize_rows(x).scale), [[False, True]])


@pytest.fixture(scope="module")
def weights() -> list[quant.QTensor]:
    return [
        quant.prepare(random_weight(kind, shape, seed))
        for seed, (kind, shape) in enumerate([("IQ2_XXS", (L, E, F, D)), ("IQ2_XXS", (L, E, F, D)), ("Q2_K", (L, E, D, F))])
    ]


def pairs_of(expert: np.ndarray) -> experts.Pairs:
    order = np.argsort(expert.reshape(-1), kind="stable").astype(np.int32)
    return experts.Pairs(jnp.asarray(expert.reshape(-1)[order]), jnp.asarray(order))


def run(x: np.ndarray, weight: np.ndarray, expert: np.ndarray, weights: list[quant.QTensor]) -> np.ndarray:
    return np.asarray(experts.apply_experts(jnp.asarray(x), jnp.asarray(weight), pairs_of(expert), weights, LAYER, CLAMP))


def example(m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m)
    expert = rng.random((m, E)).argsort(axis=1)[:, :X].astype(np.int32)
    return rng.normal(size=(m, D)).astype(np.float32), rng.random((m, X)).astype(np.float32), expert


@pytest.mark.parametrize("m", [1, 5])
def test_each_token_meets_its_experts(m: int, weights: list[quant.QTensor]) -> None:
    x, weight, expert = example(m)
    expert[0, 1] = E  # nobody
    got = run(x, weight, expert, weights)
    gate, up, down = (np.asarray(quant.dequantize(quant.take_layer(w, 1))) for w in weights)
    for token in range(m):
        for choice in range(X):
            e = expert[token, choice]
            if e == E:
                assert not got[token, choice].any()
                continue
            row = rounded(x[token : token + 1])
            hidden = np.asarray(moe.swiglu(jnp.asarray(row @ gate[e].T), jnp.asarray(row @ up[e].T), CLAMP)) * weight[token, choice]
            expected = rounded(hidden) @ down[e].T
            # A hidden value on the edge between two integers may fall to either side.
            np.testing.assert_allclose(got[token, choice], expected[0], atol=0.01 * np.abs(expected).max())
            assert np.linalg.norm(got[token, choice] - expected[0]) < 2e-3 * np.linalg.norm(expected)


def test_a_token_ignores_its_index_its_neighbours_and_their_choices(weights: list[quant.QTensor]) -> None:
    x, weight, expert = example(4)
    alone = run(x, weight, expert, weights)[0]
    x2, weight2, expert2 = example(8)
    for moved, kept in ((x2, x), (weight2, weight), (expert2, expert)):
        moved[3] = kept[0]
    np.testing.assert_array_equal(run(x2[:4], weight2[:4], expert2[:4], weights)[3], alone)


@pytest.mark.parametrize("m", [1, 16])
def test_they_lower_for_a_gpu(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    shape = jax.ShapeDtypeStruct
    weights = [
        quant.QTensor(kind, quant.field_shapes(kind, (20, 256, n, k)))
        for kind, n, k in (("IQ2_XXS:words", 2048, 4096), ("IQ2_XXS:words", 2048, 4096), ("Q2_K:words", 4096, 2048))
    ]
    assert experts.fits(*weights)
    pairs = experts.Pairs(shape((6 * m,), jnp.int32), shape((6 * m,), jnp.int32))
    arguments = [shape((m, 4096), jnp.float32), shape((m, 6), jnp.float32), pairs, weights, shape((1,), jnp.int32)]
    lower_for_cuda(monkeypatch, partial(experts.apply_experts, clamp=10.0), *arguments)
