"""Attend with all tokens of a prompt's chunk in one launch, a program a token.

All heads of a token share its keys, which are its values too. So the heads are the rows of the products, and each program goes through
exactly the rows that its token sees: the window's, then all compressed ones or a choice of its own. Keys come decoded, for each of them
meets hundreds of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch

LOG2_E = math.log2(math.e)
NOTHING = -1e30  # below any logit, and finite: differences of it are no NaN
LEAST_HEADS, MOST_HEADS = 16, 64  # Triton multiplies no smaller tiles; larger ones have no room for their results
MOST_CHANNELS = 512  # for the same reason


@dataclass(frozen=True)
class Tile:
    """Keys of a step, warps, stages of the loads."""

    keys: int
    warps: int
    stages: int


TILE = Tile(keys=64, warps=8, stages=2)


@dataclass(frozen=True)
class _Plan:
    """What the kernel knows beforehand: rows of the window, keys of a step."""

    window: int
    tile: int


def fits(n_head: int, head_dim: int, window: int) -> bool:
    """Whether `flash` takes heads of these numbers, and a window of so many rows: whole tiles."""
    return n_head <= MOST_HEADS and head_dim <= MOST_CHANNELS and window % TILE.keys == 0


def flash(
    q: jax.Array,
    keys: jax.Array,
    sinks: jax.Array,
    layer: jax.Array,
    start: jax.Array,
    n: jax.Array,
    n_comp: jax.Array,
    chosen: jax.Array | None,
    *,
    window: int,
) -> jax.Array:
    """Attend from each token of a chunk to the last `window` rows up to its own, and to compressed rows.

    Args:
        q: [B, T, N, K], normed and rotated, in the type of the keys: f16 or bf16.
        keys: [B, window + T + C, K]: the rows before the chunk, its own, then compressed rows (C may be 0).
        sinks: f32 [L, N]. layer: int32 [1], which of them.
        start, n: int32 [B], position of the first token, and how many tokens are real; the results of others are 0.
        n_comp: int32 [B, T], compressed rows that a token attends to: the first of `chosen`, or the first of all.
        chosen: int32 [B, T, k], numbers of compressed rows, or None.

    Returns:
        [B, T, N, K] in the type of q, not rotated back. A token's result depends on its own query and rows alone, bit for bit.
    """
    b, t = q.shape[:2]
    operands = [q, keys, sinks, layer, start, n, n_comp, *([] if chosen is None else [chosen])]
    kernel = partial(_kernel, plan=_Plan(window, TILE.keys))
    return launch(kernel, (t, b), jax.ShapeDtypeStruct(q.shape, q.dtype), operands, name="flash", warps=TILE.warps, stages=TILE.stages)


def _kernel(
    q_ref: Any, key_ref: Any, sink_ref: Any, layer_ref: Any, start_ref: Any, n_ref: Any, n_comp_ref: Any, *refs: Any, plan: _Plan
) -> None:
    """Attend with one token."""
    *chosen, out_ref = refs
    token, row = pl.program_id(0), pl.program_id(1)
    _, n_token, n_head, width = q_ref.shape
    # Where heads or channels are no power of two, the tiles are padded with zeros.
    head = jnp.arange(max(LEAST_HEADS, pl.next_power_of_2(n_head)))
    channel = jnp.arange(pl.next_power_of_2(width))
    inside = (head < n_head)[:, None] & (channel < width)[None, :]
    at = (row, token, head[:, None], channel[None, :])
    real = token < n_ref[row]

    @pl.when(real)
    def attend() -> None:
        q = plt.load(q_ref.at[at], mask=inside, other=0.0)
        position, n_comp = start_ref[row] + token, n_comp_ref[row, token]
        scale = LOG2_E / math.sqrt(width)

        def step(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            peak, total, value = state
            column = i * plan.tile + jnp.arange(plan.tile)
            number = column - plan.window  # of compressed rows; negative for those of the window
            in_window = number < 0
            # The window starts before the conversation does where its first tokens look.
            seen = jnp.where(in_window, position + number + 1 >= 0, number < n_comp)
            if chosen:
                number = plt.load(chosen[0].at[row, token, number], mask=seen & ~in_window, other=0)
            place = jnp.where(in_window, token + 1 + column, plan.window + n_token + number)
            rows = plt.load(key_ref.at[row, place[:, None], channel[None, :]], mask=seen[:, None] & (channel < width)[None, :], other=0.0)
            logit = jnp.where(seen[None, :], plt.dot(q, rows, trans_b=True) * scale, NOTHING)
            raised = jnp.maximum(peak, jnp.max(logit, axis=1))
            weight = jnp.exp2(logit - raised[:, None])
            decay = jnp.exp2(peak - raised)
            return raised, total * decay + jnp.sum(weight, axis=1), value * decay[:, None] + plt.dot(weight.astype(rows.dtype), rows)

        # The sink takes weight and adds nothing; with it the peak is a logit's, so that what is not seen weighs 0.
        sink = plt.load(sink_ref.at[layer_ref[0], head], mask=head < n_head, other=0.0) * LOG2_E
        state = (sink, jnp.ones(head.shape, jnp.float32), jnp.zeros(inside.shape, jnp.float32))
        n_tile = plan.window // plan.tile + pl.cdiv(n_comp, plan.tile)
        _, total, value = jax.lax.fori_loop(0, n_tile, step, state)
        plt.store(out_ref.at[at], (value * (1 / total)[:, None]).astype(out_ref.dtype), mask=inside)

    @pl.when(~real)
    def nothing() -> None:
        plt.store(out_ref.at[at], jnp.zeros(inside.shape, out_ref.dtype), mask=inside)
