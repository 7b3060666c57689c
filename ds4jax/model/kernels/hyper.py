"""Hyper-connections around a block in two launches: advance the streams past the last block, then enter the next.

The streams are a row's largest state, so whatever reads them does all it can at once: the first launch mixes the last
block's output into them and takes their products with the next mixing weights, piece by piece; the second finishes those
products, collapses the streams and normalises, while a program beside it makes the combination doubly stochastic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch
from ds4jax.model.quant.qtensor import QTensor

CHUNK = 128  # channels of each stream that a program of the first launch takes
ROWS = 4  # batch rows that share what such a program reads of the mixing weights
PAD = 32  # columns of a partial result: the mixing products, then the sum of squares


def fits(n_stream: int, n_embd: int, fn_kind: str) -> bool:
    """Whether streams of this shape and mixing weights of this format are taken."""
    n_mix = 2 * n_stream + n_stream**2
    return (
        n_stream & (n_stream - 1) == 0
        and n_embd & (n_embd - 1) == 0
        and n_embd >= CHUNK
        and n_mix < PAD
        and fn_kind in ("F32", "F16", "BF16")
    )


def advance(
    x: jax.Array, parts: Sequence[jax.Array], post: jax.Array, comb: jax.Array, fn: QTensor, layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Let a block's output join the streams, and begin the products of `HyperConnection.pre`.

    Args:
        x: f32 [M, H, D] as they were before the block; parts: f32 [M, n, D] each, whose sum is its output; post [M, H]; comb [M, H, H].
        fn: [L, 2H + H*H, H*D]; layer: int32 [1].

    Returns:
        new streams [M, H, D], and f32 [M, D / CHUNK, PAD] of which the sum over the middle axis counts.
    """
    m, h, d = x.shape
    out = [jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct((m, d // CHUNK, PAD), jnp.float32)]
    rows = math.gcd(m, ROWS)
    kernel = partial(_advance, rows=rows, n_mix=fn.shape[1])
    operands = [layer, x, post, comb, fn.fields["w"], *parts]
    new, products = launch(kernel, (d // CHUNK, m // rows), out, operands, name="hyper_advance")
    return new, products


def _advance(layer_ref: Any, x_ref: Any, post_ref: Any, comb_ref: Any, fn_ref: Any, *refs: Any, rows: int, n_mix: int) -> None:
    """Advance some channels of some rows, each with the mixing weights that all of them share."""
    *part_refs, new_ref, product_ref = refs
    chunk, first, layer = pl.program_id(0), pl.program_id(1) * rows, layer_ref[0]
    _, n_stream, width = x_ref.shape
    at, row, column = pl.ds(chunk * CHUNK, CHUNK), jnp.arange(PAD), chunk * CHUNK + jnp.arange(CHUNK)
    real = jnp.broadcast_to((row < n_mix)[:, None], (PAD, CHUNK))
    batch = [first + r for r in range(rows)]
    out = [sum((ref[m, i, at] for ref in part_refs for i in range(ref.shape[1])), jnp.zeros(CHUNK, jnp.float32)) for m in batch]
    old = [[x_ref[m, j, at] for j in range(n_stream)] for m in batch]
    products, square = [jnp.zeros((PAD, CHUNK), jnp.float32)] * rows, [jnp.zeros(CHUNK, jnp.float32)] * rows
    for h in range(n_stream):
        w = plt.load(fn_ref.at[layer, row[:, None], (h * width + column)[None, :]], mask=real, other=0.0).astype(jnp.float32)
        for r, m in enumerate(batch):
            new = post_ref[m, h] * out[r] + sum(comb_ref[m, j, h] * old[r][j] for j in range(n_stream))
            new_ref[m, h, at] = new
            products[r] = products[r] + w * new[None, :]
            square[r] = square[r] + new * new
    for r, m in enumerate(batch):
        product_ref[m, chunk, :] = jnp.where(row == n_mix, jnp.sum(square[r]), jnp.sum(products[r], axis=1))


def enter(
    x: jax.Array, products: jax.Array, scale: jax.Array, base: jax.Array, norm: jax.Array, layer: jax.Array,
    *, n_iter: int, hc_eps: float, rms_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Collapse the streams to a block's normalised input, given what `advance` returned.

    Args:
        x: f32 [M, H, D]; scale [L, 3], base [L, 2H + H*H], norm [L, D] (the block's): f32; layer: int32 [1].

    Returns:
        f32 [M, D], post [M, H] and comb [M, H, H] (see `HyperConnection.pre`).
    """
    m, h, d = x.shape
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, d), (m, h), (m, h, h))]
    kernel = partial(_enter, n_iter=n_iter, hc_eps=hc_eps, rms_eps=rms_eps)
    y, post, comb = launch(kernel, (m,), out, [layer, x, products, scale, base, norm], name="hyper_enter", warps=8)
    return y, post, comb


def _enter(
    layer_ref: Any, x_ref: Any, product_ref: Any, scale_ref: Any, base_ref: Any, norm_ref: Any, y_ref: Any, post_ref: Any, comb_ref: Any,
    *, n_iter: int, hc_eps: float, rms_eps: float,
) -> None:  # fmt: skip
    m, layer = pl.program_id(0), layer_ref[0]
    _, h, d = x_ref.shape
    n_mix = 2 * h + h * h
    chunk = jnp.arange(product_ref.shape[1])
    square = jnp.sum(plt.load(product_ref.at[m, chunk, n_mix]))
    r = 1 / jnp.sqrt(square / (h * d) + rms_eps)

    def mix(first: int, which: int) -> jax.Array:
        """Columns first .. first + H - 1, scaled and shifted: [H]."""
        column = first + jnp.arange(h)
        total = jnp.sum(plt.load(product_ref.at[m, chunk[:, None], column[None, :]]), axis=0)
        return total * r * scale_ref[layer, which] + plt.load(base_ref.at[layer, column])

    def sigmoid(z: jax.Array) -> jax.Array:
        return 1 / (1 + jnp.exp(-z))

    pre = sigmoid(mix(0, 0)) + hc_eps
    post_ref[m, :] = 2 * sigmoid(mix(h, 1))

    cell = 2 * h + jnp.arange(h)[:, None] * h + jnp.arange(h)[None, :]
    total = jnp.sum(plt.load(product_ref.at[m, chunk[:, None, None], cell[None]]), axis=0)
    z = total * r * scale_ref[layer, 2] + plt.load(base_ref.at[layer, cell])
    c = jnp.exp(z - jnp.max(z, axis=1)[:, None])
    c = c / jnp.sum(c, axis=1)[:, None] + hc_eps
    c = c / (jnp.sum(c, axis=0)[None, :] + hc_eps)

    def both(_: int, c: jax.Array) -> jax.Array:
        c = c / (jnp.sum(c, axis=1)[:, None] + hc_eps)
        return c / (jnp.sum(c, axis=0)[None, :] + hc_eps)

    comb_ref[m, :, :] = jax.lax.fori_loop(0, n_iter - 1, both, c)

    y = jnp.sum(x_ref[m, :, :] * pre[:, None], axis=0)
    y_ref[m, :] = y * (1 / jnp.sqrt(jnp.sum(y * y) / d + rms_eps)) * norm_ref[layer, :]
