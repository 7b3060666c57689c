"""Kernels of routed experts against decoding and multiplying rounded activations, and that they lower for a GPU at Flash's shapes."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.model import moe, quant
from ds4jax.model.quant.kernels import experts
from ds4jax.model.quant.kernels.activations import Int8Rows, quantize_rows
from tests.model.lowering import lower_for_cuda
from tests.model.test_quant import random_weight
from tests.model.tokens import check_company, check_nan

L, E, X, D, F, CLAMP = 2, 4, 2, 512, 256, 7.0
N_TOKEN = 5
ROWS = 64  # of weights a program, for few programs: they are slow to interpret
LAYER = np.int32([1])
PAIRINGS = [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K")]  # of gate and up, and of down


# ---------------------------------------------------------------- activations
def rounded(x: np.ndarray) -> np.ndarray:
    """What int8 with a scale for 32 makes of x [M, K]."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    q = np.round(groups * (np.float32(127) / np.where(largest == 0, np.float32(1), largest)))
    return (q * largest * np.float32(1 / 127)).reshape(x.shape)


def unpack(rows: Int8Rows) -> np.ndarray:
    m, _, n = rows.words.shape
    return np.asarray(rows.words).transpose(0, 2, 1).copy().view(np.int8).reshape(m, 32 * n)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_activations_round_to_the_nearest_and_keep_their_sums(dtype: jnp.dtype) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 256)), dtype).at[1, 32:64].set(0)
    rows = quantize_rows(x)
    q = unpack(rows).astype(np.int32)
    values = (q.reshape(3, 8, 32) * np.asarray(rows.scale)[:, :, None]).reshape(3, 256)
    np.testing.assert_allclose(values, rounded(np.asarray(x, np.float32)), rtol=1e-6)
    np.testing.assert_array_equal(rows.sums, q.reshape(3, 8, 2, 16).sum(axis=3).transpose(0, 2, 1))


def test_halves_round_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127]
    np.testing.assert_array_equal(unpack(quantize_rows(x))[0, :8], [127, 0, 2, 2, 0, -2, -2, -127])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_taints_its_group_alone(value: float) -> None:
    x = jnp.ones((1, 64)).at[0, 40].set(value)
    np.testing.assert_array_equal(np.isnan(quantize_rows(x).scale), [[False, True]])


# ---------------------------------------------------------------- products
@cache
def weights(pairing: tuple[str, str]) -> list[quant.QTensor]:
    gate_up, down = pairing
    shapes = [(gate_up, (L, E, F, D)), (gate_up, (L, E, F, D)), (down, (L, E, D, F))]
    return [quant.prepare(random_weight(kind, shape, seed)) for seed, (kind, shape) in enumerate(shapes)]


def tiles(rows: int = ROWS) -> dict[str, experts.Tile]:
    """Give programs so many rows, whatever is best on a GPU."""
    return {kind: experts.Tile(rows, 4) for kind in experts.TILES}


@cache
def compiled(pairing: tuple[str, str]) -> Callable[..., jax.Array]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "TILES", tiles())
        return jax.jit(partial(experts.apply_experts, clamp=CLAMP)).lower(*arguments(*example(N_TOKEN), pairing)).compile()


def arguments(x: np.ndarray, weight: np.ndarray, expert: np.ndarray, pairing: tuple[str, str]) -> tuple[Any, ...]:
    return jnp.asarray(x), jnp.asarray(weight), pairs_of(expert), weights(pairing), LAYER


def apply(x: np.ndarray, weight: np.ndarray, expert: np.ndarray, pairing: tuple[str, str] = PAIRINGS[0]) -> np.ndarray:
    return np.asarray(compiled(pairing)(*arguments(x, weight, expert, pairing)))


def pairs_of(expert: np.ndarray) -> experts.Pairs:
    order = np.argsort(expert.reshape(-1), kind="stable").astype(np.int32)
    return experts.Pairs(jnp.asarray(expert.reshape(-1)[order]), jnp.asarray(order))


def example(m: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    expert = rng.random((m, E)).argsort(axis=1)[:, :X].astype(np.int32)
    return rng.normal(size=(m, D)).astype(np.float32), rng.random((m, X)).astype(np.float32), expert


@pytest.mark.parametrize("kind", quant.PREPARED)
def test_integers_are_exact(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """With scales of one every sum is a whole number that float32 holds."""
    monkeypatch.setattr(experts, "TILES", tiles(rows=32))
    rng = np.random.default_rng(0)
    w = quant.prepare(random_weight(kind, (L, E, 32, 256)))
    ones = {name: jnp.full_like(w.fields[name], 8 if kind == "IQ2_XXS" else 1) for name in {"d", "dmin"} & w.fields.keys()}
    w = quant.QTensor(w.kind, w.fields | ones)
    x = rng.integers(-3, 4, (6, 256)).astype(np.float32)
    x[:, ::32] = 127
    expert = np.int32([[0, 0], [0, 0], [0, 2]])
    got = experts.down(quantize_rows(x), w, pairs_of(expert), LAYER)
    matrices = np.asarray(quant.dequantize(quant.take_layer(w, 1)), np.int64)[expert.reshape(-1)]
    np.testing.assert_array_equal(got, np.einsum("pk,pnk->pn", x.astype(np.int64), matrices))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_each_token_meets_its_experts(pairing: tuple[str, str]) -> None:
    x, weight, expert = example(N_TOKEN)
    expert[0, 1] = E  # nobody
    got = apply(x, weight, expert, pairing)
    assert not got[0, 1].any()
    gate, up, down = (np.asarray(quant.dequantize(quant.take_layer(w, 1))) for w in weights(pairing))
    exact = np.zeros_like(got)
    for token, choice in np.argwhere(expert < E):
        e, row = expert[token, choice], rounded(x[token : token + 1])
        hidden = np.asarray(moe.swiglu(jnp.asarray(row @ gate[e].T), jnp.asarray(row @ up[e].T), CLAMP)) * weight[token, choice]
        expected = (rounded(hidden) @ down[e].T)[0]
        # A hidden value on the edge between two integers may fall to either side.
        assert np.linalg.norm(got[token, choice] - expected) < 2e-3 * np.linalg.norm(expected)
        hidden = np.asarray(moe.swiglu(jnp.asarray(x[token] @ gate[e].T), jnp.asarray(x[token] @ up[e].T), CLAMP)) * weight[token, choice]
        exact[token, choice] = hidden @ down[e].T
    # Activations rounded to int8, twice: 0.6 % each on normal values, and more where a gate near zero is the small rest of large sums.
    assert np.linalg.norm(got - exact) < 0.05 * np.linalg.norm(exact)


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), n_chosen=st.integers(X, E))
def test_a_token_ignores_its_index_its_neighbours_and_their_choices(seed: int, n_chosen: int) -> None:
    check_company(example, apply, N_TOKEN, E, seed, n_chosen)


def test_nan_stays_with_its_token() -> None:
    check_nan(example, apply, N_TOKEN)


def test_what_they_cannot_take_is_refused() -> None:
    def shapes(gate: str, down: str, f: int, d: int) -> list[quant.QTensor]:
        layout = [(gate, (1, 2, f, d)), (gate, (1, 2, f, d)), (down, (1, 2, d, f))]
        return [quant.QTensor(kind, quant.field_shapes(kind, shape)) for kind, shape in layout]

    assert experts.fits(*shapes("IQ2_XXS:words", "Q2_K:words", 256, 512))
    assert not experts.fits(*shapes("IQ2_XXS", "Q2_K:words", 256, 512))  # as in the file
    assert not experts.fits(*shapes("Q4_K:words", "Q4_K:words", 256, 768))  # rows of three blocks


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_they_lower_for_a_gpu(monkeypatch: pytest.MonkeyPatch, pairing: tuple[str, str], m: int) -> None:
    monkeypatch.setattr(experts, "TILES", tiles(rows=16))
    shape = jax.ShapeDtypeStruct
    (gate_up, down), sizes = (f"{kind}:words" for kind in pairing), (20, 256)
    layout = [(gate_up, (*sizes, 2048, 4096)), (gate_up, (*sizes, 2048, 4096)), (down, (*sizes, 4096, 2048))]
    w = [quant.QTensor(kind, quant.field_shapes(kind, s)) for kind, s in layout]
    assert experts.fits(*w)
    assert all(np.prod(field.shape) < 2**31 for one in w for field in one.fields.values())
    pairs = experts.Pairs(shape((6 * m,), jnp.int32), shape((6 * m,), jnp.int32))
    arguments = [shape((m, 4096), jnp.float32), shape((m, 6), jnp.float32), pairs, w, shape((1,), jnp.int32)]
    lower_for_cuda(monkeypatch, partial(experts.apply_experts, clamp=10.0), *arguments)
