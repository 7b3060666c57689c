"""Routed experts of a decode step: one program for a pair (token, expert) and some rows of its expert's weights.

Pairs come sorted by expert, and programs of neighbouring pairs run side by side on the same rows, so what several tokens
need of an expert is read from memory once. Products are of int8 by int8 in exact integers, four at a time; only scales are
floats. Decoding costs as much as memory here: see `repack` for how little is left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import assembly, dot4, launch
from ds4jax.model.quant.kernels.activations import quantize_rows
from ds4jax.model.quant.qtensor import QTensor

GATE_ROWS, GATE_WARPS = 8, 8
DOWN_ROWS, DOWN_WARPS = 32, 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs:
    """Pairs (token, expert) sorted by expert. expert: int32 [P], n_expert or more for nobody; home: int32 [P], token * X + choice."""

    expert: jax.Array
    home: jax.Array


def fits(gate: QTensor, up: QTensor, down: QTensor) -> bool:
    """Whether `apply_experts` takes stacked weights [L, E, N, K] of these formats and sizes."""
    sizes = (*gate.shape[-2:], *down.shape[-2:])
    return gate.kind == up.kind == "IQ2_XXS:words" and down.kind == "Q2_K:words" and all(n & (n - 1) == 0 and n >= 256 for n in sizes)


def apply_experts(x: jax.Array, weight: jax.Array, pairs: Pairs, weights: Sequence[QTensor], layer: jax.Array, clamp: float) -> jax.Array:
    """Apply to every token its experts: down(swiglu(gate x, up x) * weight).

    Args:
        x: [M, D] normalised inputs. weight: f32 [M, X] of each choice. weights: gate, up [L, E, F, D] and down [L, E, D, F].
        layer: int32 [1].

    Returns:
        f32 [M, X, D]; 0 where nobody is chosen.
    """
    gate, up, down = weights
    (m, x_used), f, d = weight.shape, gate.shape[-2], down.shape[-2]
    n_pair, n_expert = m * x_used, gate.shape[1]
    rows = quantize_rows(x)
    operands = [layer, pairs.expert, pairs.home, weight.reshape(-1), rows.words, rows.scale, *_fields(gate), *_fields(up)]
    hidden = launch(
        partial(_gate_up, rows=min(GATE_ROWS, f), n_group=x.shape[1] // 32, n_used=x_used, n_expert=n_expert, clamp=clamp),
        (n_pair, f // min(GATE_ROWS, f)),
        jax.ShapeDtypeStruct((n_pair, f), jnp.float32),
        operands,
        name="experts_gate_up",
        warps=GATE_WARPS,
    )
    rows = quantize_rows(hidden)
    y = launch(
        partial(_down, rows=min(DOWN_ROWS, d), n_group=f // 128, n_expert=n_expert),
        (n_pair, d // min(DOWN_ROWS, d)),
        jax.ShapeDtypeStruct((n_pair, d), jnp.float32),
        [layer, pairs.expert, pairs.home, rows.words, rows.scale, rows.sums, *_fields(down)],
        name="experts_down",
        warps=DOWN_WARPS,
    )
    return y.reshape(m, x_used, d)


def _fields(w: QTensor) -> list[jax.Array]:
    names = {"IQ2_XXS:words": ("code0", "code1", "sign", "scale", "d"), "Q2_K:words": ("q", "scales", "d", "dmin")}[w.kind]
    return [w.fields[name] for name in names]


def _permute(selector: jax.Array) -> jax.Array:
    """Turn four selectors, the low nibbles of each half word, into four int8 weights: +-8, 25 or 43."""

    def meaning(selector: jax.Array) -> jax.Array:
        word = jnp.zeros_like(selector)
        for k in range(4):
            nibble = selector >> 4 * k & 7
            code = nibble & 3
            magnitude = 8 + 17 * code + (code >> 1)
            word = word | (jnp.where(nibble >= 4, -magnitude, magnitude) & 255) << 8 * k
        return word

    return assembly("prmt.b32 $0, 0x002B1908, 0x00D5E7F8, $1;", [selector], meaning)


def _words(code0: jax.Array, code1: jax.Array, sign: jax.Array) -> list[jax.Array]:
    """Decode IQ2_XXS:words: eight int32 words of four int8 weights for every group of 32."""
    words = []
    for quarter in range(4):
        code = (code0 if quarter < 2 else code1) >> 2 * (quarter & 1)
        selector = (code & 0x33333333) | (sign >> quarter & 0x11111111) << 2
        words += [_permute(selector), _permute(selector >> 16)]
    return words


def _tile(ref: Any, layer: Any, expert: Any, rows: Any, columns: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(ref[layer, expert, rows, columns], jnp.int32)


def _spread(row: jax.Array, n: int) -> jax.Array:
    return jnp.broadcast_to(row[None, :], (n, row.shape[0]))


def _when_chosen(expert: Any, n_expert: int, out_ref: Any, at: tuple[Any, ...], compute: Callable[[], jax.Array]) -> None:
    """Store what compute() gives, or zeros where nobody is chosen."""

    @pl.when(expert < n_expert)
    def _() -> None:
        out_ref[at] = compute()

    @pl.when(expert >= n_expert)
    def _() -> None:
        out_ref[at] = jnp.zeros(at[1].size, jnp.float32)


def _gate_up(
    layer_ref: Any, expert_ref: Any, home_ref: Any, weight_ref: Any, words_ref: Any, scale_ref: Any, *refs: Any,
    rows: int, n_group: int, n_used: int, n_expert: int, clamp: float,
) -> None:  # fmt: skip
    *fields, out_ref = refs
    pair, first = pl.program_id(0), pl.program_id(1) * rows
    layer, expert, home = layer_ref[0], expert_ref[pair], home_ref[pair]
    at = pl.ds(first, rows)

    def compute() -> jax.Array:
        token = home // n_used
        x = [_spread(words_ref[token, pl.ds(w * n_group, n_group)], rows) for w in range(8)]
        x_scale = scale_ref[token, :][None, :]
        row, block = first + jnp.arange(rows)[:, None], jnp.arange(n_group)[None, :] // 8

        def product(code0: Any, code1: Any, sign: Any, scale: Any, d: Any) -> jax.Array:
            total = jnp.zeros((rows, n_group), jnp.int32)
            for w, word in enumerate(_words(*(_tile(ref, layer, expert, at, slice(None)) for ref in (code0, code1, sign)))):
                total = dot4(word, x[w], total)
            scales = scale[layer, expert, at, :].astype(jnp.float32) * plt.load(d.at[layer, expert, row, block]).astype(jnp.float32)
            return jnp.sum(total.astype(jnp.float32) * (scales * 0.125 * x_scale), axis=1)

        gate, up = product(*fields[:5]), product(*fields[5:])
        gate = jnp.minimum(gate, clamp)
        return gate / (1 + jnp.exp(-gate)) * jnp.clip(up, -clamp, clamp) * weight_ref[home]

    _when_chosen(expert, n_expert, out_ref, (home, at), compute)


def _down(
    layer_ref: Any, expert_ref: Any, home_ref: Any, words_ref: Any, scale_ref: Any, sums_ref: Any,
    q: Any, scales: Any, d: Any, dmin: Any, out_ref: Any, *, rows: int, n_group: int, n_expert: int,
) -> None:  # fmt: skip
    """n_group: of 128 weights. Plane j of a group is its j-th 32 weights, half of which share a scale and a minimum."""
    pair, first = pl.program_id(0), pl.program_id(1) * rows
    layer, expert, home = layer_ref[0], expert_ref[pair], home_ref[pair]
    at, group = pl.ds(first, rows), jnp.arange(n_group)

    def compute() -> jax.Array:
        row, block = first + jnp.arange(rows)[:, None], group[None, :] // 2
        big, least = (plt.load(ref.at[layer, expert, row, block]).astype(jnp.float32) for ref in (d, dmin))
        total = jnp.zeros((rows, n_group), jnp.float32)
        for half in range(2):
            words = [_tile(q, layer, expert, at, pl.ds((4 * half + w) * n_group, n_group)) for w in range(4)]
            for plane in range(4):
                of_row = 4 * group + plane  # groups of 32 in the activations
                products = jnp.zeros((rows, n_group), jnp.int32)
                for w, word in enumerate(words):
                    x = plt.load(words_ref.at[home, (4 * half + w) * 4 * n_group + of_row])
                    products = dot4(word >> 2 * plane & 0x03030303, _spread(x, rows), products)
                both = scales[layer, expert, at, pl.ds((4 * half + plane) * n_group, n_group)].astype(jnp.int32)
                scale, minimum = (both & 15).astype(jnp.float32), (both >> 4).astype(jnp.float32)
                sums = plt.load(sums_ref.at[home, half * 4 * n_group + of_row])[None, :]
                x_scale = plt.load(scale_ref.at[home, of_row])[None, :]
                total = total + x_scale * (big * scale * products.astype(jnp.float32) - least * minimum * sums)
        return jnp.sum(total, axis=1)

    _when_chosen(expert, n_expert, out_ref, (home, at), compute)
