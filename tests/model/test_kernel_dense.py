"""The kernel of dense products against decoding and multiplying, and that it lowers for a GPU at the shapes of Flash."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.model import moe, quant
from ds4jax.model.quant.kernels import dense
from tests.model.lowering import lower_for_cuda
from tests.model.test_quant import random_weight

LAYER = np.int32([1])


def rows(m: int, k: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (m, k), jnp.bfloat16)


def close(got: jax.Array, x: jax.Array, w: jax.Array) -> None:
    """Expanded weights and rows are bfloat16 where tensor cores multiply: each product is right to 2**-8."""
    scale = np.abs(np.asarray(x, np.float32)) @ np.abs(np.asarray(w, np.float32)).T
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert np.all(np.abs(np.asarray(got, np.float64) - exact) <= scale * 2.0**-8)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("m", [1, 2, 3, 17])
def test_it_multiplies_by_the_layer(kind: str, m: int) -> None:
    w, x = random_weight(kind, (3, 48, 256)), rows(m, 256)
    close(dense.dense_matmul(x, w, LAYER), x, quant.dequantize(quant.take_layer(w, 1)))


@pytest.mark.parametrize("m", [1, 5])
def test_groups_of_rows_meet_groups_of_columns(m: int) -> None:
    w, x = random_weight("Q8_0", (2, 64, 128)), rows(m, 4 * 128)
    got = dense.dense_matmul(x, w, LAYER, groups=4)
    expected = quant.grouped_matmul(x.reshape(m, 4, 128).astype(jnp.float32), quant.take_layer(w, 1))
    np.testing.assert_allclose(got, expected.reshape(m, 64), rtol=0.02, atol=0.02 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("groups", [1, 2])
def test_parts_add_up_to_the_product(m: int, groups: int) -> None:
    w, x = random_weight("Q8_0", (2, 64, 1024)), rows(m, groups * 1024)
    parts = dense.dense_parts(x, w, LAYER, groups=groups)
    assert parts.shape == (m, dense.n_parts(m, w), 64)
    assert (parts.shape[1] > 1) == (m > dense.FEW)
    whole = quant.dequantize(quant.take_layer(w, 1)).reshape(groups, -1, 1024)
    for got, columns, rows_of_group in zip(*(jnp.split(a, groups, axis=1) for a in (parts.sum(axis=1), x)), whole, strict=True):
        close(got, columns, rows_of_group)


@pytest.mark.parametrize("m", [1, 4])
def test_gate_and_up_end_in_swiglu(m: int) -> None:
    w, x = random_weight("Q8_0", (2, 64, 128)), rows(m, 128)
    gate, up = jnp.split(quant.matmul(x.astype(jnp.float32), quant.take_layer(w, 1)), 2, axis=1)
    expected = moe.swiglu(gate, up, 1.5)
    got = dense.dense_matmul(x, w, LAYER, swiglu_clamp=1.5)
    np.testing.assert_allclose(got, expected, atol=0.03 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("m", [2, 8])
def test_a_row_ignores_its_index_and_its_neighbours(m: int) -> None:
    w, x = random_weight("Q8_0", (2, 32, 1024)), rows(m, 1024)
    there = np.asarray(dense.dense_matmul(x, w, LAYER))
    other = rows(m, 1024, seed=1).at[m - 1].set(x[0])
    np.testing.assert_array_equal(np.asarray(dense.dense_matmul(other, w, LAYER))[m - 1], there[0])


@pytest.mark.parametrize("m", [1, 2, 4, 32, 64])
@pytest.mark.parametrize(
    ("kind", "n", "k", "options"),
    [
        ("Q8_0", 1536, 4096, {}),
        ("Q8_0", 32768, 1024, {}),
        ("Q8_0", 8192, 4096, {"groups": 8}),
        ("Q8_0", 4096, 8192, {}),
        ("Q8_0", 4096, 4096, {"swiglu_clamp": 10.0}),
        ("Q8_0", 129280, 4096, {}),
        ("F16", 2624, 4096, {}),
        ("F16", 256, 4096, {}),
    ],
)
def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch, kind: str, n: int, k: int, options: dict, m: int) -> None:
    w = quant.QTensor(kind, quant.field_shapes(kind, (2, n, k)))
    assert dense.fits(w, m, options.get("groups", 1))
    x = jax.ShapeDtypeStruct((m, k * options.get("groups", 1)), jnp.bfloat16)
    lower_for_cuda(monkeypatch, partial(dense.dense_matmul, **options), x, w, jax.ShapeDtypeStruct((1,), jnp.int32))
