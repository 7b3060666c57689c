"""Choose experts and sort the pairs (token, expert), in two launches with a program a row."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
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
        weights f32 [M, X], and the pairs sorted by expert, those of rows that are not live last, with expert E. A single row's are in
        the order of its choice.
    """
    m, e = logits.shape
    shape = jax.ShapeDtypeStruct
    out = [shape((m, n_used), jnp.float32), shape((m, n_used), jnp.int32)]
    chooser = bias if table is None else table
    assert chooser is not None
    kernel = partial(_choose, by_token=table is not None, scale=scale, least=least)
    weight, expert = launch(kernel, (m,), out, [layer, logits, chooser, token, live.astype(jnp.int32)], name="router", warps=1)
    if m == 1:  # no two pairs share an expert, so their order means nothing
        return weight, Pairs(expert.reshape(-1), jnp.arange(n_used, dtype=jnp.int32))
    pairs = [shape((m * n_used,), jnp.int32)] * 2
    return weight, Pairs(*launch(_sort, (m,), pairs, [expert], name="sort_pairs"))


def _choose(
    layer_ref: Any, logits_ref: Any, chooser_ref: Any, token_ref: Any, live_ref: Any, weight_ref: Any, expert_ref: Any,
    *, by_token: bool, scale: float, least: float,
) -> None:  # fmt: skip
    """Choose one row's experts."""
    m, layer, (e, n_used) = pl.program_id(0), layer_ref[0], (logits_ref.shape[1], weight_ref.shape[1])
    column = jnp.arange(_power_of_two(e))
    logits = plt.load(logits_ref.at[m, column], mask=column < e, other=0.0)
    score = jnp.sqrt(jnp.maximum(logits, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))
    if by_token:
        chosen = [chooser_ref[layer, token_ref[m], i] for i in range(n_used)]
    else:
        rest = jnp.where(column < e, score + plt.load(chooser_ref.at[layer, column], mask=column < e, other=0.0), -jnp.inf)
        chosen = []
        for _ in range(n_used):
            pick = jnp.min(jnp.where(rest == jnp.max(rest), column, e - 1))  # of equals the lowest
            chosen.append(pick)
            rest = jnp.where(column == pick, -jnp.inf, rest)
    weight = [jnp.sum(jnp.where(column == pick, score, 0.0)) for pick in chosen]
    total = jnp.maximum(sum(weight[1:], weight[0]), least)
    for i, (w, pick) in enumerate(zip(weight, chosen, strict=True)):
        weight_ref[m, i] = w / total * scale
        expert_ref[m, i] = jnp.where(live_ref[m] != 0, pick, e)


def _sort(chosen_ref: Any, expert_ref: Any, home_ref: Any) -> None:
    """Place one row's pairs by the number of pairs that come before each."""
    m, (n_row, n_used) = pl.program_id(0), chosen_ref.shape
    n_pair = n_row * n_used
    other = jnp.arange(_power_of_two(n_pair))
    key = plt.load(chosen_ref.at[other // n_used, other % n_used], mask=other < n_pair, other=0) * n_pair + other  # by expert, then place
    for i in range(n_used):
        expert, home = chosen_ref[m, i], m * n_used + i
        before = (key < expert * n_pair + home) & (other < n_pair)
        rank = jnp.sum(before.astype(jnp.int32))
        expert_ref[rank] = expert
        home_ref[rank] = home


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
