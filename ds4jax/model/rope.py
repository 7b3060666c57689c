"""Partial interleaved rotary embedding, with YaRN on the layers that compress.

Only the last R channels rotate, in pairs (2i, 2i+1). There is no magnitude scaling.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.config import ModelConfig
from ds4jax.model.sums import rounded


def frequencies(config: ModelConfig, compressed: bool) -> np.ndarray:
    """Compute the angular frequencies of one kind of layer.

    Args:
        compressed: whether the layer has a compression ratio; such layers use their own base and YaRN's blend of
            interpolated and original frequencies (a ramp over the pair index).

    Returns:
        [R/2] f32, rounded from float64 so that every backend sees the same values.
    """
    n_rot = config.n_rot
    pair = np.arange(n_rot // 2, dtype=np.float64)
    base = config.rope_base_compressed if compressed else config.rope_base
    omega = base ** (-2 * pair / n_rot)
    if compressed:

        def edge(beta: float) -> float:
            """Pair index that turns `beta` times over the original context."""
            return float(n_rot * np.log(config.yarn_original_ctx / (2 * np.pi * beta)) / (2 * np.log(base)))

        low = max(np.floor(edge(config.yarn_beta_fast)), 0)
        high = min(np.ceil(edge(config.yarn_beta_slow)), n_rot - 1)
        keep = 1 - np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
        omega = omega * (keep + (1 - keep) / config.yarn_factor)
    return omega.astype(np.float32)


def rotate(x: jax.Array, position: jax.Array, omega: np.ndarray, *, inverse: bool = False) -> jax.Array:
    """Rotate the last channels of x by its position.

    Args:
        x: [..., n] f32 with n >= R.
        position: int32, shape of x without its last axis (or broadcastable to it, same rank).
        omega: [R/2] f32 from `frequencies`.
        inverse: rotate back (attention outputs carry the rotation of their values).

    Returns:
        [..., n] f32.
    """
    n_plain = x.shape[-1] - 2 * omega.shape[0]
    # theta is one f32 product, as in the published inference code: f32 angles at long range are part of the model.
    theta = position.astype(jnp.float32)[..., None] * jnp.asarray(omega).reshape((1,) * position.ndim + (-1,))
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    if inverse:
        sin = -sin
    plain, tail = x[..., :n_plain], x[..., n_plain:]
    pairs = tail.reshape(*tail.shape[:-1], -1, 2)
    x0, x1 = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([rounded(x0 * cos) - rounded(x1 * sin), rounded(x0 * sin) + rounded(x1 * cos)], axis=-1).reshape(tail.shape)
    return jnp.concatenate([plain, rotated], axis=-1)
