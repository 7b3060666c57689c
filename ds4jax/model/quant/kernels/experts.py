"""Routed experts of a decode step: int8 activations meet packed weights in exact integers, and only scales are floats.

A program has some rows of an expert's weights and one token. Pairs (token, expert) come sorted by expert, and programs of
neighbouring pairs start side by side on the same weight rows, so what several tokens need of an expert is read from memory
once. Results go to the place their pair came from; nothing is sorted back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch
from ds4jax.model.quant.kernels.activations import GROUP, Int8Rows, quantize_rows
from ds4jax.model.quant.kernels.dense import swiglu
from ds4jax.model.quant.kernels.formats import FORMATS, Decoded, Row, load
from ds4jax.model.quant.qtensor import QTensor


@dataclass(frozen=True)
class Tile:
    """Rows of weights of a program, and its warps."""

    rows: int
    warps: int


# Few rows: decoding them for several tokens of an expert at once, measured at up to 64 tokens, loses more to registers than it saves.
TILES = {"IQ2_XXS:words": Tile(4, 4), "Q2_K:words": Tile(8, 4), "Q4_K:words": Tile(8, 4)}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """Pairs (token, expert) sorted by expert. expert: int32 [P], n_expert or more for nobody; home: int32 [P], token * X + choice."""

    expert: jax.Array = field(repr=False)
    home: jax.Array = field(repr=False)


def fits(gate: QTensor, up: QTensor, down: QTensor) -> bool:
    """Whether `apply_experts` takes stacked weights [L, E, N, K] of these formats and sizes."""
    return gate.kind == up.kind and all(_fits(w) for w in (gate, up, down))


def _fits(w: QTensor) -> bool:
    n, k = w.shape[-2:]
    return w.kind in FORMATS and k & (k - 1) == 0 and k >= 256 and n % TILES[w.kind].rows == 0


def apply_experts(x: jax.Array, weight: jax.Array, pairs: Pairs, weights: Sequence[QTensor], layer: jax.Array, clamp: float) -> jax.Array:
    """Apply to every token its experts: down(swiglu(gate x, up x) * weight), in four launches.

    Args:
        x: [M, D] normalised inputs. weight: f32 [M, X] of each choice. weights: gate, up [L, E, F, D] and down [L, E, D, F], prepared.
        layer: int32 [1].

    Returns:
        f32 [M, X, D]; 0 where nobody is chosen. A token's result depends on its own input and choices alone, bit for bit.
    """
    gate, up, down_ = weights
    hidden = gate_up(quantize_rows(x), gate, up, pairs, layer, clamp=clamp, weight=weight)
    return down(quantize_rows(hidden), down_, pairs, layer).reshape(*weight.shape, -1)


def gate_up(rows: Int8Rows, gate: QTensor, up: QTensor, pairs: Pairs, layer: jax.Array, *, clamp: float, weight: jax.Array) -> jax.Array:
    """Multiply tokens by the gate and up of their experts [L, E, F, D]: swiglu(gate, up, clamp) * weight, f32 [M * X, F].

    rows: M tokens of D. weight: f32 [M, X]. The result lies at each pair's home; 0 for nobody.
    """
    return _multiply("experts_gate_up", rows, [gate, up], pairs, layer, weight=weight, clamp=clamp)


def down(rows: Int8Rows, w: QTensor, pairs: Pairs, layer: jax.Array) -> jax.Array:
    """Multiply hidden rows by the down of their experts [L, E, D, F]: f32 [M * X, D], at each pair's home; 0 for nobody.

    rows: M * X rows of F, at their home.
    """
    return _multiply("experts_down", rows, [w], pairs, layer)


def _multiply(
    name: str,
    rows: Int8Rows,
    weights: Sequence[QTensor],
    pairs: Pairs,
    layer: jax.Array,
    *,
    weight: jax.Array | None = None,
    clamp: float = 0.0,
) -> jax.Array:
    kind, (_, n_expert, n, k) = weights[0].kind, weights[0].shape
    (n_pair,) = pairs.expert.shape
    tile = TILES[kind]
    fields = [w.fields[field] for w in weights for field in FORMATS[kind].fields]
    statics: dict[str, Any] = {"kind": kind, "tile": tile, "n_expert": n_expert, "n_group": k // GROUP}
    operands = [layer, pairs.expert, pairs.home, rows.words, rows.scale, rows.sums]
    if weight is None:
        kernel = partial(_kernel, per_token=1, clamp=None, **statics)
    else:
        kernel = partial(_kernel, per_token=weight.shape[1], clamp=clamp, **statics)
        operands.append(weight.reshape(-1))
    out = jax.ShapeDtypeStruct((n_pair, n), jnp.float32)
    # The first axis runs fastest: neighbours in the list of pairs work on the same weight rows at the same time.
    return launch(kernel, (n_pair, n // tile.rows), out, [*operands, *fields], name=name, warps=tile.warps)


def _kernel(
    layer_ref: Any, expert_ref: Any, home_ref: Any, words_ref: Any, scale_ref: Any, sums_ref: Any, *refs: Any,
    kind: str, tile: Tile, n_expert: int, n_group: int, per_token: int, clamp: float | None,
) -> None:  # fmt: skip
    *fields, out_ref = refs
    if clamp is not None:
        weight_ref, *fields = fields
    form = FORMATS[kind]
    pair, row = pl.program_id(0), pl.program_id(1) * tile.rows + jnp.arange(tile.rows)
    expert = expert_ref[pair]
    home = home_ref[pair]

    @pl.when(expert >= n_expert)
    def _() -> None:
        plt.store(out_ref.at[home, row], jnp.zeros(tile.rows, jnp.float32))

    @pl.when(expert < n_expert)
    def _() -> None:
        layer = layer_ref[0]
        matrices = [
            form.decode(*load(tuple(refs), form.fields, layer, expert, row, n_group))
            for refs in (fields[i : i + len(form.fields)] for i in range(0, len(fields), len(form.fields)))
        ]

        x = _activations(words_ref, scale_ref, sums_ref, home // per_token, (tile.rows, n_group))

        def product(w: Decoded) -> jax.Array:
            return jnp.sum(form.products(w, x), axis=1)

        y = product(matrices[0])
        if clamp is not None:
            y = swiglu(y, product(matrices[1]), clamp) * weight_ref[home]
        plt.store(out_ref.at[home, row], y)


def _activations(words_ref: Any, scale_ref: Any, sums_ref: Any, row: Any, shape: tuple[int, int]) -> Row:
    """Read a row of Int8Rows, spread over the rows of a tile: loaded as tiles, which are where the products want them."""
    group = jnp.broadcast_to(jnp.arange(shape[1])[None, :], shape)
    words = [plt.load(words_ref.at[row, w, group]) for w in range(8)]
    sums = (plt.load(sums_ref.at[row, 0, group]), plt.load(sums_ref.at[row, 1, group]))
    return Row(words, plt.load(scale_ref.at[row, group]), sums)
