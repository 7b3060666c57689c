"""Choose experts and sort the pairs (token, expert) in one launch: a single program for all rows of a decode step."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch
from ds4jax.model.quant.kernels.experts import Pairs


def choose(
    logits: jax.Array, bias: jax.Array | None, table: jax.Array | None, token: jax.Array, live: jax.Array, layer: jax.Array,
    *, n_used: int, scale: float, least: float,
) -> tuple[jax.Array, Pairs]:  # fmt: skip
    """Choose n_used experts a row (see `moe.MoE.choose`).

    Args:
        logits: f32 [M, E]. bias: f32 [L, E], or table: int32 [L, V, X] of experts by token. token: int32 [M]. live: bool [M].
        layer: int32 [1]. scale: of the weights; least: floor of their sum.

    Returns:
        weights f32 [M, X], and the pairs sorted by expert, those of rows that are not live last, with expert E.
    """
    m, e = logits.shape
    shape = jax.ShapeDtypeStruct
    out = [shape((m, n_used), jnp.float32), shape((m * n_used,), jnp.int32), shape((m * n_used,), jnp.int32)]
    chooser = bias if table is None else table
    kernel = partial(_kernel, by_token=table is not None, n_used=n_used, scale=scale, least=least)
    weight, expert, home = launch(kernel, (1,), out, [layer, logits, chooser, token, live.astype(jnp.int32)], name="router", warps=8)
    return weight, Pairs(expert, home)


def _kernel(
    layer_ref: Any, logits_ref: Any, chooser_ref: Any, token_ref: Any, live_ref: Any, weight_ref: Any, expert_ref: Any, home_ref: Any,
    *, by_token: bool, n_used: int, scale: float, least: float,
) -> None:  # fmt: skip
    layer, (m, e) = layer_ref[0], logits_ref.shape
    rows, columns = _power_of_two(m), _power_of_two(e)
    row, column = jnp.arange(rows), jnp.arange(columns)
    inside = (row < m)[:, None] & (column < e)[None, :]
    logits = plt.load(logits_ref.at[row[:, None], column[None, :]], mask=inside, other=0.0)
    score = jnp.sqrt(jnp.maximum(logits, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))
    if by_token:
        token = plt.load(token_ref.at[row], mask=row < m, other=0)
        chosen = [plt.load(chooser_ref.at[layer, token, i]) for i in range(n_used)]
    else:
        bias = plt.load(chooser_ref.at[layer, column], mask=column < e, other=0.0)
        open_ = jnp.where(inside, score + bias[None, :], -jnp.inf)
        chosen = []
        for _ in range(n_used):
            best = jnp.max(open_, axis=1)[:, None]
            pick = jnp.min(jnp.where(open_ == best, column[None, :], columns - 1), axis=1)  # of equals the lowest
            chosen.append(pick)
            open_ = jnp.where(column[None, :] == pick[:, None], -jnp.inf, open_)
    weight = [jnp.sum(jnp.where(column[None, :] == pick[:, None], score, 0.0), axis=1) for pick in chosen]
    total = jnp.maximum(sum(weight[1:], weight[0]), least)
    for i, w in enumerate(weight):
        plt.store(weight_ref.at[row, i], w / total * scale, mask=row < m)

    live = plt.load(live_ref.at[row], mask=row < m, other=0)
    expert = [jnp.where(live != 0, pick, e) for pick in chosen]
    key = [(pick * rows + row) * n_used + i for i, pick in enumerate(expert)]  # sorts by expert, then by place
    for i in range(n_used):
        rank = jnp.zeros(rows, jnp.int32)
        for other in key:
            smaller = (other[None, :] < key[i][:, None]) & (row < m)[None, :]
            rank = rank + jnp.sum(smaller.astype(jnp.int32), axis=1)
        plt.store(expert_ref.at[rank], expert[i], mask=row < m)
        plt.store(home_ref.at[rank], row * n_used + i, mask=row < m)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
