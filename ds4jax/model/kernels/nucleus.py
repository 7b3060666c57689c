"""Find what top-k and top-p keep, in one launch that costs nothing where no row asks for it.

As array code this is a loop of 62 passes that a GPU would have to run, or to ask the host about, at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch

TILE = 2048  # of the vocabulary at a time
SPLIT = 8  # a pass over the vocabulary cuts the interval of floors in so many
ONE_BITS = 0x3F800000  # of 1.0
PASSES = 11  # SPLIT ** PASSES exceeds the bit patterns between 0.0 and 1.0


def nucleus_floor(weight: jax.Array, top_k: jax.Array, top_p: jax.Array, active: jax.Array) -> jax.Array:
    """Compute `sampling.nucleus_floor` of weight [B, V] f32 (best token 1) for the rows that are active (bool [B]): f32 [B], else 0."""
    b, v = weight.shape
    operands = [weight, top_k.astype(jnp.int32), top_p.astype(jnp.float32), active.astype(jnp.int32)]
    out = jax.ShapeDtypeStruct((b,), jnp.float32)
    return launch(partial(_kernel, v=v), (b,), out, operands, name="nucleus", warps=8)


def _kernel(weight_ref: Any, k_ref: Any, p_ref: Any, active_ref: Any, out_ref: Any, *, v: int) -> None:
    row = pl.program_id(0)
    out_ref[row] = jnp.float32(0.0)

    @pl.when(active_ref[row] != 0)
    def _() -> None:
        def sums(floors: list[Any], measure: Callable[[jax.Array], jax.Array], least: Any) -> list[Any]:
            """Sum measure(weight) over the row's weights that reach each floor, and `least` too."""

            def tile(t: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                at = t * TILE + jnp.arange(TILE)
                w = plt.load(weight_ref.at[row, at], mask=at < v, other=-1.0)
                amount = jnp.where(w >= least, measure(w), 0.0)
                return tuple(total + jnp.where(w >= floor, amount, 0.0) for total, floor in zip(totals, floors, strict=True))

            zeros = tuple(jnp.zeros(TILE, jnp.float32) for _ in floors)
            return [jnp.sum(total) for total in jax.lax.fori_loop(0, pl.cdiv(v, TILE), tile, zeros)]

        def largest_floor(measure: Callable[[jax.Array], jax.Array], least: Any, target: Any) -> Any:
            """Find the largest floor whose sum reaches the target, among bit patterns: those of positive floats order like them."""

            def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                low, high = bounds
                whole, rest = (high - low) // SPLIT, (high - low) % SPLIT
                cuts = [low + whole * j + rest * j // SPLIT for j in range(1, SPLIT)]
                reached = sums([jax.lax.bitcast_convert_type(c, jnp.float32) for c in cuts], measure, least)
                for cut, total in zip(cuts, reached, strict=True):
                    low = jnp.where(total >= target, jnp.maximum(low, cut), low)
                    high = jnp.where(total >= target, high, jnp.minimum(high, cut))
                return low, high

            low, _ = jax.lax.fori_loop(0, PASSES, narrow, (jnp.int32(0), jnp.int32(ONE_BITS + 1)))
            return jax.lax.bitcast_convert_type(low, jnp.float32)

        k = jnp.where(k_ref[row] > 0, jnp.minimum(k_ref[row], v), v).astype(jnp.float32)
        at_k = largest_floor(lambda w: (w > 0.0).astype(jnp.float32), jnp.float32(0.0), k)
        (mass,) = sums([at_k], lambda w: w, jnp.float32(0.0))
        at_p = largest_floor(lambda w: w, at_k, p_ref[row] * mass)
        out_ref[row] = jnp.where(p_ref[row] < 1.0, jnp.maximum(at_p, at_k), at_k)
