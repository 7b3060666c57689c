"""Prepared layouts hold the weights of their file bit for bit, at any leading axes, and split to them row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.model import quant
from ds4jax.model.quant import PREPARED
from tests.model.test_quant import DEQUANTIZE, random_weight

PREPARE = jax.jit(quant.prepare)


@pytest.mark.parametrize("kind", PREPARED)
@pytest.mark.parametrize("shape", [(5, 512), (2, 3, 4, 1024)])
def test_prepared_weights_decode_to_the_same_bits(kind: str, shape: tuple[int, ...]) -> None:
    w = random_weight(kind, shape)
    prepared = PREPARE(w)
    assert prepared.kind == PREPARED[kind] and prepared.shape == shape
    shapes = quant.field_shapes(prepared.kind, shape)
    assert {n: (a.shape, a.dtype) for n, a in prepared.fields.items()} == {n: (s.shape, s.dtype) for n, s in shapes.items()}
    np.testing.assert_array_equal(np.asarray(DEQUANTIZE(prepared)).view(np.uint32), np.asarray(DEQUANTIZE(w)).view(np.uint32))


@pytest.mark.parametrize("kind", PREPARED)
def test_a_row_is_prepared_by_itself(kind: str) -> None:
    w = random_weight(kind, (4, 512))
    one = PREPARE(jax.tree.map(lambda a: a[2:3], w))
    for name, field in PREPARE(w).fields.items():
        np.testing.assert_array_equal(one.fields[name], field[2:3])
        assert field.dtype != jnp.int64
