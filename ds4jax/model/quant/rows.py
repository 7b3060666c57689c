"""Use a packed matrix by rows: look rows up, or let groups of rows meet groups of inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ds4jax.model.quant.columns import take_outputs
from ds4jax.model.quant.formats import dequantize
from ds4jax.model.quant.matmul import matmul
from ds4jax.model.quant.qtensor import QTensor


def embed(index: Array, w: QTensor) -> Array:
    """Look up rows of w [V, D] at int32 index [M]: f32 [M, D]. Only those rows are decoded."""
    return dequantize(jax.tree.map(lambda a: a[index], w))


def grouped_matmul(x: Array, w: QTensor, *, out_dtype: DTypeLike | None = None) -> Array:
    """Multiply x [M, G, K] by w [G * R, K], group g of x by rows [g * R, (g + 1) * R): [M, G, R] in `out_dtype` (default: x.dtype)."""
    n_group = x.shape[1]
    n = w.shape[-2] // n_group
    products = []
    for g in range(n_group):
        part, before = take_outputs(w, g * n, n)
        products.append(matmul(x[:, g], part, out_dtype=out_dtype)[:, before : before + n])
    return jnp.stack(products, axis=1)
