"""Products in the compute type. What they return is all that is kept for gradients, so it is small: the rest is computed anew."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ds4jax.model.quant import QTensor, dequantize


def contract(formula: str, x: jax.Array, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiply as `einsum` does, operands and result in `dtype`, float32 as float32 on every device."""
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(formula, x.astype(dtype), y.astype(dtype), precision=exact, preferred_element_type=dtype)


def product(x: jax.Array, w: QTensor | jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiply x [..., K] by w [N, K] in `dtype`: f32 [..., N]."""
    plain = dequantize(w, dtype) if isinstance(w, QTensor) else w
    return contract("...k,nk->...n", x, plain, dtype).astype(jnp.float32)
