"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp

from ds4jax.model.sums import ordered_sum


def rms_norm(x: jax.Array, eps: float, weight: jax.Array | None = None) -> jax.Array:
    """Scale x to unit root mean square over its last axis, then by weight.

    Args:
        x: [..., n] f32.
        eps: added to the mean square, under the root.
        weight: [n] f32, or None for the unweighted form (queries per head, hyper-connections).

    Returns:
        [..., n] f32.
    """
    y = x * jax.lax.rsqrt(ordered_sum(jnp.square(x), -1) / x.shape[-1] + eps)
    return y if weight is None else y * jnp.broadcast_to(weight, y.shape)
