"""Multiply activations by packed weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ds4jax.model.quant.columns import multiply_columns
from ds4jax.model.quant.formats import dequantize
from ds4jax.model.quant.layouts import layout_of
from ds4jax.model.quant.qtensor import QTensor


def matmul(x: Array, w: QTensor, *, precision: lax.PrecisionLike = None, out_dtype: DTypeLike | None = None) -> Array:
    """Multiply x [..., K] by w [N, K]: [..., N] in `out_dtype` (default: x.dtype), accumulated in float32.

    The weights are expanded to x.dtype on the fly and never kept. On a CPU sums over blocks of integer products run at a fifth of the speed
    or less. Weights by columns are multiplied as float32 or as x.dtype, whatever `precision`.
    """
    if layout_of(w.kind).by_columns:
        y = multiply_columns(x.reshape(-1, x.shape[-1]), w)
        return y.reshape(*x.shape[:-1], -1).astype(out_dtype or x.dtype)
    return dot(x, dequantize(w, x.dtype), precision=precision).astype(out_dtype or x.dtype)


def precise_matmul(x: Array, w: QTensor) -> Array:
    """Multiply x f32 [M, K], in float16's range, by w [N, K] of type F16: f32 [M, N], nearly as right as float32 products.

    For accelerators, which multiply float16 many times faster: x goes in two pieces of 11 bits.
    """
    high = x.astype(jnp.float16)
    low = ((x - high.astype(jnp.float32)) * 2048).astype(jnp.float16)
    y = dot(jnp.concatenate([high, low]), dequantize(w, jnp.float16))
    return y[: len(x)] + y[len(x) :] * (1 / 2048)


def dot(x: Array, w: Array, *, precision: lax.PrecisionLike = None) -> Array:
    """Multiply x [..., K] by plain weights [N, K] of the same type: f32 [..., N].

    float32 operands are multiplied as float32 unless `precision` says otherwise: accelerators would round them to fewer bits.
    """
    if precision is None and x.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    if is_alone := x.ndim > 1 and x.size == x.shape[-1] and jax.default_backend() == "cpu":
        x = jnp.concatenate([x, x], axis=0)  # one row alone would be added up in another order than rows beside others are
    dimensions = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    y = lax.dot_general(x, w, dimensions, precision=precision, preferred_element_type=jnp.float32)
    return y[:1] if is_alone else y
