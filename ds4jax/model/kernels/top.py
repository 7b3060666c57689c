"""Find the largest values of each row that wants them, in two launches that cost nothing where no row does.

The array code sorts whole rows, and does so at every step, since a GPU cannot skip it without asking the host.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch

BLOCK = 2048  # values that one program holds


def top(x: jax.Array, active: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k largest values of each row of x [B, N] f32, and their places (int32), as `jax.lax.top_k` does: [B, k] each.

    Rows that are not active hold anything. k: at most N, and far below BLOCK.
    """
    b, n = x.shape
    n_block = pl.cdiv(n, BLOCK)
    shape = (b, n_block, k)
    out = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32))
    value, place = launch(partial(_kernel, n=n, k=k), (n_block, b), out, [x, active.astype(jnp.int32)], name="top", warps=8)
    value, place = value.reshape(b, -1), place.reshape(b, -1)
    if n_block == 1:
        return value, place
    value, winner = top(value, active, k)  # winners stand in order, so equals still come by their places
    return value, jnp.take_along_axis(place, winner, axis=1, mode="clip")


def _kernel(x_ref: Any, active_ref: Any, value_ref: Any, place_ref: Any, *, n: int, k: int) -> None:
    block, row = pl.program_id(0), pl.program_id(1)

    @pl.when(active_ref[row] != 0)
    def _() -> None:
        at = block * BLOCK + jnp.arange(BLOCK)

        def take(j: jax.Array, left: jax.Array) -> jax.Array:
            best = jnp.max(left)
            first = jnp.min(jnp.where(left == best, at, jnp.int32(2**31 - 1)))
            value_ref[row, block, j] = best
            place_ref[row, block, j] = first
            return jnp.where(at == first, -jnp.inf, left)

        jax.lax.fori_loop(0, k, take, plt.load(x_ref.at[row, at], mask=at < n, other=-jnp.inf))
