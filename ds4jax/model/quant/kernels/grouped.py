"""Routed experts of a prompt's chunk: packed weights become float16 planes in registers and meet many tokens on tensor cores.

A program has some rows of an expert's weights and a block of the pairs (token, expert) that chose it, so weights are decoded once for all
tokens of a block. What a program does for a pair depends on the pair alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch
from ds4jax.model.quant.kernels.blocks import Blocks, cut_into_blocks
from ds4jax.model.quant.kernels.dense import swiglu
from ds4jax.model.quant.kernels.planes import GROUP, PLANES, SCALE_UP, WORDS, to_planes
from ds4jax.model.quant.layouts import layout_of
from ds4jax.model.quant.qtensor import QTensor

LEAST_MEMBERS, MOST_MEMBERS = 16, 128  # of a block


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows of weights of a program, groups of 32 values of a step, warps, stages of the loads."""

    rows: int
    groups: int
    warps: int
    stages: int


GATE_UP = Tile(rows=64, groups=32, warps=4, stages=3)
DOWN = Tile(rows=128, groups=32, warps=4, stages=2)


def fits(gate: QTensor, up: QTensor, down: QTensor) -> bool:
    """Whether `apply_grouped` takes stacked weights [L, E, N, K] of these formats and sizes."""

    def taken(w: QTensor, tile: Tile) -> bool:
        n, k = w.shape[-2:]
        return w.kind in PLANES and n % tile.rows == 0 and k % (GROUP * tile.groups) == 0

    return gate.kind == up.kind and taken(gate, GATE_UP) and taken(up, GATE_UP) and taken(down, DOWN)


def block_members(n_pair: int, n_expert: int) -> int:
    """Choose the pairs of a block: twice the power of two that holds what an expert gets on average and a quarter more.

    Experts that get more share their weights with all of it, and for those that do not the block's second half is left out.
    """
    expected = 2 * pl.cdiv(5 * n_pair, 4 * n_expert)
    return min(max(pl.next_power_of_2(expected), LEAST_MEMBERS), MOST_MEMBERS)


def apply_grouped(
    x: jax.Array, weight: jax.Array, expert: jax.Array, weights: Sequence[QTensor], layer: jax.Array, clamp: float
) -> jax.Array:
    """Apply to every token its experts and add them up: sum over choices of down(swiglu(gate x, up x) * weight).

    Args:
        x: [T, D] normalised inputs, in float16's range. weight: f32 [T, X] of each choice. expert: int32 [T, X]; a value outside
            0..E-1 chooses nobody and adds nothing.
        weights: gate, up [L, E, F, D] and down [L, E, D, F], prepared. layer: int32 [1].

    Returns:
        f32 [T, D]. A token's result depends on its own input and choices alone, bit for bit.
    """
    gate, up, down_ = weights
    n_expert = gate.shape[1]
    blocks = cut_into_blocks(expert.reshape(-1), n_expert, block_members(expert.size, n_expert))
    hidden = gate_up(to_planes(x), gate, up, blocks, layer, clamp=clamp, weight=weight)
    y = down(hidden, down_, blocks, layer).reshape(*expert.shape, -1)
    chosen = (expert >= 0) & (expert < n_expert)  # what nobody wrote is anything, NaN included
    terms = jnp.where(chosen[:, :, None], y, 0)
    # Term by term: elementwise sums fuse, in one order.
    return sum((terms[:, i] for i in range(1, terms.shape[1])), terms[:, 0])


def gate_up(x: jax.Array, gate: QTensor, up: QTensor, blocks: Blocks, layer: jax.Array, *, clamp: float, weight: jax.Array) -> jax.Array:
    """Multiply tokens by the gate and up of their experts [L, E, F, D]: swiglu(gate, up, clamp) * weight, in planes f16 [P, 32, F/32].

    x: f16 [T, 32, D/32], in planes. weight: f32 [T, X]. Result p is that of pair p = token * X + choice; unspecified for nobody.
    """
    n, n_pair = gate.shape[-2], weight.size
    kernel = partial(_kernel, kind=gate.kind, tile=GATE_UP, n_expert=gate.shape[1], per_token=weight.shape[1], clamp=clamp)
    out = jax.ShapeDtypeStruct((n_pair, n), jnp.float16)
    hidden = _multiply(kernel, out, [layer, blocks.expert, blocks.pair, x, weight.reshape(-1)], [gate, up], GATE_UP, "experts_gate_up")
    return hidden.reshape(n_pair, GROUP, n // GROUP)


def down(hidden: jax.Array, w: QTensor, blocks: Blocks, layer: jax.Array) -> jax.Array:
    """Multiply what `gate_up` gives by the down of each pair's expert [L, E, D, F]: f32 [P, D], unspecified for nobody."""
    kernel = partial(_kernel, kind=w.kind, tile=DOWN, n_expert=w.shape[1], per_token=1, clamp=None)
    out = jax.ShapeDtypeStruct((hidden.shape[0], w.shape[-2]), jnp.float32)
    return _multiply(kernel, out, [layer, blocks.expert, blocks.pair, hidden], [w], DOWN, "experts_down")


def _multiply(kernel: Any, out: Any, operands: Sequence[jax.Array], weights: Sequence[QTensor], tile: Tile, name: str) -> jax.Array:
    fields = [a for w in weights for _, a in sorted(w.fields.items())]
    # The tiles of a block's weights run side by side: together they read its tokens once, and the next block of the same expert finds
    # the weights still near.
    grid = (out.shape[1] // tile.rows, operands[1].shape[0])
    return launch(kernel, grid, out, [*operands, *fields], name=name, warps=tile.warps, stages=tile.stages)


def _kernel(
    layer_ref: Any, expert_ref: Any, pair_ref: Any, x_ref: Any, *refs: Any,
    kind: str, tile: Tile, n_expert: int, per_token: int, clamp: float | None,
) -> None:  # fmt: skip
    *fields, out_ref = refs
    if clamp is not None:
        weight_ref, *fields = fields
    column = pl.program_id(0) * tile.rows + jnp.arange(tile.rows)
    block = pl.program_id(1)
    expert = expert_ref[block]
    n_pair, n = out_ref.shape

    def multiply(members: int) -> None:
        layer = layer_ref[0]
        # Rows of gate and up are visited plane by plane, so that hidden values come out in planes.
        row = column if clamp is None else column % (n // GROUP) * GROUP + column // (n // GROUP)
        pair = pair_ref[block, pl.ds(0, members)]
        token = jnp.where(pair < n_pair, pair, 0) // per_token
        names = sorted(layout_of(kind).parts)
        matrices = [dict(zip(names, fields[i : i + len(names)], strict=True)) for i in range(0, len(fields), len(names))]

        def step(i: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            group = i * tile.groups + jnp.arange(tile.groups)
            words = [PLANES[kind](partial(_read, refs, layer, expert, row, group)) for refs in matrices]

            def four_planes(j: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                for p, ws in enumerate(zip(*(word(j) for word in words), strict=True)):
                    x = plt.load(x_ref.at[token[:, None], 4 * j + p, group[None, :]])
                    totals = tuple(t + plt.dot(x, w, trans_b=True) for t, w in zip(totals, ws, strict=True))
                return totals

            return jax.lax.fori_loop(0, WORDS, four_planes, totals)

        zero = jnp.zeros((members, tile.rows), jnp.float32)
        totals = jax.lax.fori_loop(0, x_ref.shape[2] // tile.groups, step, (zero,) * len(matrices))
        first, *second = (t * (1 / SCALE_UP) for t in totals)
        y = first
        if clamp is not None:
            y = swiglu(first, second[0], clamp) * plt.load(weight_ref.at[pair], mask=pair < n_pair, other=0.0)[:, None]
        plt.store(out_ref.at[pair[:, None], column[None, :]], y.astype(out_ref.dtype), mask=(pair < n_pair)[:, None])

    most = pair_ref.shape[1]
    used, half = expert < n_expert, most // 2
    if half < LEAST_MEMBERS:
        pl.when(used)(partial(multiply, most))
    else:
        full = pair_ref[block, half] < n_pair
        pl.when(used & full)(partial(multiply, most))
        pl.when(used & ~full)(partial(multiply, half))


def _read(refs: dict[str, Any], layer: Any, expert: Any, row: jax.Array, group: jax.Array, name: str) -> jax.Array:
    """Read a field's tile [rows, groups], as `planes.Read` says."""
    if name in ("d", "dmin"):  # one for eight groups
        return plt.load(refs[name].at[layer, expert, row[:, None], group[None, :] // 8]).astype(jnp.float32)
    tile = plt.load(refs[name].at[layer, expert, row[:, None], group[None, :]])
    return jax.lax.bitcast_convert_type(tile, jnp.int32) if tile.dtype == jnp.uint32 else tile
