"""Normalise and rotate the queries of a prompt's chunk in one launch: as array code, each of the two goes through memory by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ds4jax.model.kernels.launch import launch

HEADS = 16  # of a program, at most


def finish_queries(q: jax.Array, position: jax.Array, *, omega: np.ndarray, eps: float, dtype: DTypeLike) -> jax.Array:
    """Compute `rope.rotate(norm.rms_norm(q))`.

    Args:
        q: f32 [M, N, K], N a power of two, as the projection gives them; the last R channels rotate.
        position: int32 [M]. omega: f32 [R/2] from `rope.frequencies`. eps: of the norm.

    Returns:
        [M, N, K] in dtype.
    """
    m, n_head, _ = q.shape
    theta = jnp.repeat(position.astype(jnp.float32)[:, None] * jnp.asarray(omega)[None, :], 2, axis=1)  # [M, R]
    sign = np.where(np.arange(theta.shape[1]) % 2 == 0, -1.0, 1.0).astype(np.float32)
    operands = [q, jnp.cos(theta), jnp.sin(theta) * jnp.asarray(sign)[None, :]]
    heads = min(HEADS, n_head)
    kernel = partial(_kernel, heads=heads, eps=eps)
    return launch(kernel, (n_head // heads, m), jax.ShapeDtypeStruct(q.shape, dtype), operands, name="query")


def _kernel(q_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any, *, heads: int, eps: float) -> None:
    """Finish some heads of one token."""
    token, width, n_rot = pl.program_id(1), q_ref.shape[2], cos_ref.shape[1]
    head, channel = pl.program_id(0) * heads + jnp.arange(heads), jnp.arange(pl.next_power_of_2(width))
    n_plain, turned = width - n_rot, jnp.arange(n_rot)

    def load(channel: jax.Array, inside: jax.Array) -> jax.Array:
        mask = inside[None, :] & jnp.full((heads, channel.shape[0]), True)
        return plt.load(q_ref.at[token, head[:, None], channel[None, :]], mask=mask, other=0.0)

    x = load(channel, channel < width)
    # A channel that rotates meets the other of its pair, which is read again: tiles do not exchange their elements.
    own, other = load(n_plain + turned, turned < n_rot), load(n_plain + (turned ^ 1), turned < n_rot)
    cos, sin = (plt.load(ref.at[token, turned])[None, :] for ref in (cos_ref, sin_ref))
    root = (1 / jnp.sqrt(jnp.sum(x * x, axis=1) / width + eps))[:, None]
    plain = (channel < n_plain)[None, :] & jnp.full(x.shape, True)
    plt.store(out_ref.at[token, head[:, None], channel[None, :]], (x * root).astype(out_ref.dtype), mask=plain)
    rotated = (own * cos + other * sin) * root
    plt.store(out_ref.at[token, head[:, None], (n_plain + turned)[None, :]], rotated.astype(out_ref.dtype))
