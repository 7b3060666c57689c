"""Weights by columns hold what the file's do, and give a row the same bits among any number of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.model import quant
from tests.compiler import run_as_users_do

ROWS = (1, 2, 5, 16, 127, 256)  # among them those at which another way of multiplying begins


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def weight(kind: str, *shape: int) -> quant.QTensor:
    if kind == "Q8_0":
        rng = np.random.default_rng(sum(shape))
        scales = rng.uniform(0.01, 0.02, (*shape[:-1], shape[-1] // 32)).astype(np.float16)
        fields = {"d": scales, "q": rng.integers(-127, 128, shape, np.int8)}
    else:
        fields = {"w": numbers(*shape).astype(quant.field_shapes(kind, shape)["w"].dtype)}
    return jax.tree.map(jnp.asarray, quant.QTensor(kind, fields))


def by_columns(w: quant.QTensor) -> quant.QTensor:
    return quant.arrange(w, quant.COLUMNS[w.kind])


def same_bits(a: jax.Array, b: jax.Array) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("kind", quant.COLUMNS)
def test_the_same_values_and_bytes(kind: str) -> None:
    w = weight(kind, 3, 70, 512)
    turned = by_columns(w)
    assert turned.shape == w.shape and turned.nbytes == w.nbytes * 128 // 70, "two tiles of 64 rows"
    abstract = quant.abstract(turned.kind, w.shape)
    assert jax.tree.structure(turned) == jax.tree.structure(abstract)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(turned)] == [(a.shape, a.dtype) for a in jax.tree.leaves(abstract)]
    assert same_bits(quant.dequantize(turned), quant.dequantize(w))
    assert same_bits(quant.dequantize(quant.take_layer(turned, 1)), quant.dequantize(quant.take_layer(w, 1)))


@pytest.mark.parametrize(("kind", "n", "k"), [("Q8_0", 1024, 128), ("Q8_0", 128, 512), ("F16", 1028, 256), ("F32", 65, 64)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(kind: str, n: int, k: int) -> None:
    w, x = weight(kind, n, k), numbers(ROWS[-1], k)
    assert quant.suits_columns(kind, n, k)
    whole = np.asarray(run_as_users_do(quant.matmul, x, by_columns(w)))
    for m in ROWS[:-1]:
        assert same_bits(run_as_users_do(quant.matmul, x[:m], by_columns(w)), whole[:m]), f"{m} rows differ from {ROWS[-1]}"
    exact = x.astype(np.float64) @ np.asarray(quant.dequantize(w), np.float64).T
    np.testing.assert_allclose(whole, exact, rtol=0, atol=3e-6 * np.abs(exact).max())


def test_bfloat16_rows_meet_bfloat16_weights() -> None:
    w, x = weight("Q8_0", 128, 64), jnp.asarray(numbers(3, 64), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(quant.dequantize(w, jnp.bfloat16), np.float64).T
    for m in (1, 3):
        got = jax.jit(lambda x, w: quant.matmul(x, w, out_dtype=jnp.float32))(x[:m], by_columns(w))
        np.testing.assert_allclose(got, exact[:m], rtol=0, atol=3e-6 * np.abs(exact).max())


@pytest.mark.parametrize("m", [1, 3])
def test_groups_and_batches_of_rows(m: int) -> None:
    w, x = weight("Q8_0", 1400, 64), numbers(m, 2, 64)  # groups of 700, tiles of 512
    for product in (quant.grouped_matmul, quant.matmul):
        want = jax.jit(product)(x, w)
        np.testing.assert_allclose(jax.jit(product)(x, by_columns(w)), want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_an_expert_gives_a_pair_the_same_bits_among_any_number_of_pairs() -> None:
    n_expert, n_pairs = 4, 40
    w = weight("Q8_0", 2, n_expert, 64, 128)
    x, expert = numbers(n_pairs, 128), np.random.default_rng(0).integers(0, n_expert + 1, n_pairs)

    def multiply(x: jax.Array, expert: jax.Array, w: quant.QTensor) -> jax.Array:
        return quant.expert_matmul(x, w, quant.route(expert, n_expert), 1)

    whole = np.asarray(run_as_users_do(multiply, x, expert, by_columns(w)))
    for n in (1, 3, 12):
        assert same_bits(run_as_users_do(multiply, x[:n], expert[:n], by_columns(w)), whole[:n])
    np.testing.assert_allclose(whole, jax.jit(multiply)(x, expert, w), rtol=0, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize(
    ("kind", "n", "k"), [("Q4_K", 256, 256), ("Q8_0", 32, 256), ("Q8_0", 256, 1024), ("Q8_0", 256, 32), ("F16", 128, 100)]
)
def test_what_cannot_gain_stays_as_in_the_file(kind: str, n: int, k: int) -> None:
    assert not quant.suits_columns(kind, n, k)
