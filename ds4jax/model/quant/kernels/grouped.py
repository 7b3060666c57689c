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
from ds4jax.model.quant.kernels.planes import GROUP, PLANES, SCALE_UP, WORDS, join, to_planes
from ds4jax.model.quant.layouts import layout_of
from ds4jax.model.quant.qtensor import QTensor

LEAST_MEMBERS, MOST_MEMBERS = 16, 128  # of a block


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows of weights of a program, groups of 32 values of a step, warps, stages of the loads, planes of a `dot`."""

    rows: int
    groups: int
    warps: int
    stages: int
    joined: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of an expert's two products."""

    gate_up: Tile
    down: Tile


# For blocks of up to SMALL members, and for larger ones; measured at 256 and 512 tokens, and at 2,048 and 4,096. Joined planes need fewer
# steps, each of which waits for all warps, and more instructions.
SMALL = 32
FEW = Tiles(gate_up=Tile(32, 16, 4, 3, joined=4), down=Tile(128, 32, 4, 2, joined=1))
MANY = Tiles(gate_up=Tile(64, 16, 4, 3, joined=4), down=Tile(128, 32, 4, 3, joined=2))


def fits(gate: QTensor, up: QTensor, down: QTensor) -> bool:
    """Whether `apply_grouped` takes stacked weights [L, E, N, K] of these formats and sizes."""

    def taken(w: QTensor, tile: Tile) -> bool:
        n, k = w.shape[-2:]
        return w.kind in PLANES and n % tile.rows == 0 and k % (GROUP * tile.groups) == 0

    return gate.kind == up.kind and all(taken(gate, t.gate_up) and taken(up, t.gate_up) and taken(down, t.down) for t in (FEW, MANY))


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
    members = block_members(expert.size, n_expert)
    tiles = FEW if members <= SMALL else MANY
    blocks = cut_into_blocks(expert.reshape(-1), n_expert, members)
    hidden = gate_up(to_planes(x, tiles.gate_up.joined), gate, up, blocks, layer, tiles, clamp=clamp, weight=weight)
    y = down(hidden, down_, blocks, layer, tiles).reshape(*expert.shape, -1)
    chosen = (expert >= 0) & (expert < n_expert)  # what nobody wrote is anything, NaN included
    terms = jnp.where(chosen[:, :, None], y, 0)
    # Term by term: elementwise sums fuse, in one order.
    return sum((terms[:, i] for i in range(1, terms.shape[1])), terms[:, 0])


def gate_up(
    x: jax.Array, gate: QTensor, up: QTensor, blocks: Blocks, layer: jax.Array, tiles: Tiles, *, clamp: float, weight: jax.Array
) -> jax.Array:
    """Multiply tokens by the gate and up of their experts [L, E, F, D]: swiglu(gate, up, clamp) * weight, f16 [P, F] in planes.

    x: f16 [T, D] in planes (`to_planes`). weight: f32 [T, X]. Result p is that of pair p = token * X + choice; unspecified for nobody.
    """
    n, n_pair, tile, joined = gate.shape[-2], weight.size, tiles.gate_up, tiles.down.joined
    kernel = partial(
        _kernel, kind=gate.kind, tile=tile, n_expert=gate.shape[1], per_token=weight.shape[1], clamp=clamp, joined=joined
    )  # fmt: skip
    out = jax.ShapeDtypeStruct((n_pair, n), jnp.float16)
    operands = [layer, blocks.expert, blocks.pair, x, weight.reshape(-1)]
    hidden = _multiply(kernel, out, operands, [gate, up], tile, "experts_gate_up")
    return hidden.reshape(n_pair, GROUP // joined, -1)


def down(hidden: jax.Array, w: QTensor, blocks: Blocks, layer: jax.Array, tiles: Tiles) -> jax.Array:
    """Multiply what `gate_up` gives by the down of each pair's expert [L, E, D, F]: f32 [P, D], unspecified for nobody."""
    kernel = partial(_kernel, kind=w.kind, tile=tiles.down, n_expert=w.shape[1], per_token=1, clamp=None, joined=1)
    out = jax.ShapeDtypeStruct((hidden.shape[0], w.shape[-2]), jnp.float32)
    return _multiply(kernel, out, [layer, blocks.expert, blocks.pair, hidden], [w], tiles.down, "experts_down")


def _multiply(kernel: Any, out: Any, operands: Sequence[jax.Array], weights: Sequence[QTensor], tile: Tile, name: str) -> jax.Array:
    fields = [a for w in weights for _, a in sorted(w.fields.items())]
    # The tiles of a block's weights run side by side: together they read its tokens once, and the next block of the same expert finds
    # the weights still near.
    grid = (out.shape[1] // tile.rows, operands[1].shape[0])
    return launch(kernel, grid, out, [*operands, *fields], name=name, warps=tile.warps, stages=tile.stages)


def _kernel(
    layer_ref: Any, expert_ref: Any, pair_ref: Any, x_ref: Any, *refs: Any,
    kind: str, tile: Tile, n_expert: int, per_token: int, clamp: float | None, joined: int,
) -> None:  # fmt: skip
    """Multiply a block by some rows of weights. joined: of the planes in which a gate's results are stored."""
    *fields, out_ref = refs
    if clamp is not None:
        weight_ref, *fields = fields
    column = pl.program_id(0) * tile.rows + jnp.arange(tile.rows)
    block = pl.program_id(1)
    expert = expert_ref[block]
    n_pair, n = out_ref.shape

    def multiply(members: int) -> None:
        layer = layer_ref[0]
        row = column
        if clamp is not None:  # rows are visited in the order of planes, so that hidden values come out in planes
            plane, place = column // (n // GROUP * joined), column % (n // GROUP * joined)
            row = place // joined * GROUP + plane * joined + place % joined
        pair = pair_ref[block, pl.ds(0, members)]
        token = jnp.where(pair < n_pair, pair, 0) // per_token
        names = sorted(layout_of(kind).parts)
        matrices = [dict(zip(names, fields[i : i + len(names)], strict=True)) for i in range(0, len(fields), len(names))]

        def step(i: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            group = i * tile.groups + jnp.arange(tile.groups)
            words = [PLANES[kind](partial(_read, refs, layer, expert, row, group)) for refs in matrices]

            def four_planes(j: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                planes = [word(j) for word in words]
                at = i * tile.groups * tile.joined + jnp.arange(tile.groups * tile.joined)
                for p in range(0, 4, tile.joined):
                    x = plt.load(x_ref.at[token[:, None], (4 * j + p) // tile.joined, at[None, :]])
                    ws = [join(four[p : p + tile.joined]) for four in planes]
                    totals = tuple(t + plt.dot(x, w, trans_b=True) for t, w in zip(totals, ws, strict=True))
                return totals

            return jax.lax.fori_loop(0, WORDS, four_planes, totals)

        zero = jnp.zeros((members, tile.rows), jnp.float32)
        totals = jax.lax.fori_loop(0, x_ref.shape[2] // (tile.groups * tile.joined), step, (zero,) * len(matrices))
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
