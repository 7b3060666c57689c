"""Hyper-connections around a block in two launches: advance the streams past the last block, then enter the next.

The streams are a row's largest state, so whatever reads them does all it can at once: the first launch mixes the last
block's output into them and takes their products with the next mixing weights, piece by piece; the second finishes those
products, collapses the streams and normalises, while a program beside it makes the combination doubly stochastic. A
prompt's chunk has rows enough for tensor cores, which take the products in a launch of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ds4jax.model.kernels.launch import launch
from ds4jax.model.quant.qtensor import QTensor

CHUNK = 128  # channels of each stream that a program of the first launch takes
FEW = 16  # batch rows of which each has its own programs, or the GPU would not be full
ROWS = 4  # of more rows, so many share what a program reads of the mixing weights
MANY = 128  # rows from which on a launch of its own takes the products, on tensor cores
JOINED = 1024  # channels of each stream that a program then takes to join
TILE_ROWS, TILE_DEPTH, SPLITS = 64, 64, 8  # of a program of products: rows, channels at a time, and parts of all channels
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
        new streams [M, H, D], and f32 [M, some pieces, PAD] of which the sum over the middle axis counts.
    """
    m, h, d = x.shape
    out = [jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct((m, d // CHUNK, PAD), jnp.float32)]
    if m >= MANY:
        new = _join(x, parts, post, comb)
        return new, _products(new, fn, layer)
    rows = math.gcd(m, ROWS if m > FEW else 1)
    kernel = partial(_advance, rows=rows, n_mix=fn.shape[1])
    operands = [layer, x, post, comb, fn.fields["w"], *parts]
    new, products = launch(kernel, (d // CHUNK, m // rows), out, operands, name="hyper_advance")
    return new, products


def _advance(layer_ref: Any, x_ref: Any, post_ref: Any, comb_ref: Any, fn_ref: Any, *refs: Any, rows: int, n_mix: int) -> None:
    """Advance some channels of some rows, which share what is read of the mixing weights."""
    *part_refs, new_ref, product_ref = refs
    chunk, layer, (_, n_stream, width) = pl.program_id(0), layer_ref[0], x_ref.shape
    at, row, column = pl.ds(chunk * CHUNK, CHUNK), jnp.arange(PAD), chunk * CHUNK + jnp.arange(CHUNK)
    real = jnp.broadcast_to((row < n_mix)[:, None], (PAD, CHUNK))
    batch = [pl.program_id(1) * rows + r for r in range(rows)]
    # Everything is read before anything is stored: no load may overtake a store, and one after the other they would wait for memory.
    weights = [plt.load(fn_ref.at[layer, row[:, None], (h * width + column)[None, :]], mask=real, other=0.0) for h in range(n_stream)]
    outs = [sum((ref[m, i, at] for ref in part_refs for i in range(ref.shape[1])), jnp.zeros(CHUNK, jnp.float32)) for m in batch]
    olds = [[x_ref[m, j, at] for j in range(n_stream)] for m in batch]
    for m, out, old in zip(batch, outs, olds, strict=True):
        new = [post_ref[m, h] * out + sum(comb_ref[m, j, h] * old[j] for j in range(n_stream)) for h in range(n_stream)]
        products = sum(w.astype(jnp.float32) * n[None, :] for w, n in zip(weights, new, strict=True))
        square = jnp.sum(sum(n * n for n in new))
        product_ref[m, chunk, :] = jnp.where(row == n_mix, square, jnp.sum(products, axis=1))
        for h, n in enumerate(new):
            new_ref[m, h, at] = n


def _join(x: jax.Array, parts: Sequence[jax.Array], post: jax.Array, comb: jax.Array) -> jax.Array:
    """Let a block's output join the streams; arguments as in `advance`."""

    def kernel(x_ref: Any, post_ref: Any, comb_ref: Any, *refs: Any) -> None:
        *part_refs, new_ref = refs
        at, m, n_stream = pl.ds(pl.program_id(0) * width, width), pl.program_id(1), x_ref.shape[1]
        out = sum((ref[m, i, at] for ref in part_refs for i in range(ref.shape[1])), jnp.zeros(width, jnp.float32))
        old = [x_ref[m, j, at] for j in range(n_stream)]
        for h in range(n_stream):
            new_ref[m, h, at] = post_ref[m, h] * out + sum(comb_ref[m, j, h] * old[j] for j in range(n_stream))

    m, _, d = x.shape
    width = min(JOINED, d)
    return launch(kernel, (d // width, m), jax.ShapeDtypeStruct(x.shape, x.dtype), [x, post, comb, *parts], name="hyper_join")


def _products(x: jax.Array, fn: QTensor, layer: jax.Array) -> jax.Array:
    """Multiply streams [M, H, D] by the mixing weights, as `advance` returns it: f32 [M, SPLITS, PAD]."""
    m, _, d = x.shape
    flat, (_, n_mix, k) = x.reshape(m, -1), fn.shape
    part = k // SPLITS
    depth = min(TILE_DEPTH, part)

    def kernel(layer_ref: Any, x_ref: Any, fn_ref: Any, out_ref: Any) -> None:
        split, layer = pl.program_id(0), layer_ref[0]
        row, product = pl.program_id(1) * TILE_ROWS + jnp.arange(TILE_ROWS), jnp.arange(PAD)
        real = (row < m)[:, None]

        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total, square = state
            at = (split * part + i * depth + jnp.arange(depth))[None, :]
            new = plt.load(x_ref.at[row[:, None], at], mask=real, other=0.0)
            weight = plt.load(fn_ref.at[layer, product[:, None], at], mask=(product < n_mix)[:, None], other=0.0)
            # Tensor cores round to 11 bits: what products of such pieces add up to was within 1e-5 of the largest, on an H200.
            for piece in _pieces(new):
                for factor in _pieces(weight.astype(jnp.float32))[: 2 if fn_ref.dtype == jnp.float32 else 1]:
                    total += plt.dot(piece, factor, trans_b=True, allow_tf32=True)
            return total, square + jnp.sum(new * new, axis=1)

        zeros = jnp.zeros((TILE_ROWS, PAD), jnp.float32), jnp.zeros(TILE_ROWS, jnp.float32)
        total, square = lax.fori_loop(0, part // depth, step, zeros)
        total = jnp.where(product[None, :] == n_mix, square[:, None], total)
        plt.store(out_ref.at[row[:, None], split, product[None, :]], total, mask=real)

    out = jax.ShapeDtypeStruct((m, SPLITS, PAD), jnp.float32)
    grid = (SPLITS, pl.cdiv(m, TILE_ROWS))
    return launch(kernel, grid, out, [layer, flat, fn.fields["w"]], name="hyper_products", stages=2)


def _pieces(x: jax.Array) -> list[jax.Array]:
    """Cut f32 numbers in their first 11 bits and the rest."""
    high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-8192), jnp.float32)
    return [high, x - high]


def enter(
    x: jax.Array, products: jax.Array, scale: jax.Array, base: jax.Array, norm: jax.Array, layer: jax.Array,
    *, n_iter: int, hc_eps: float, rms_eps: float, dtypes: Sequence[DTypeLike] = (jnp.float32,),
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:  # fmt: skip
    """Collapse the streams to a block's normalised input, given what `advance` returned.

    Args:
        x: f32 [M, H, D]; scale [L, 3], base [L, 2H + H*H], norm [L, D] (the block's): f32; layer: int32 [1].
        dtypes: in which the input is wanted.

    Returns:
        the input [M, D] in each of these types, post f32 [M, H] and comb f32 [M, H, H] (see `HyperConnection.pre`).
    """
    m, h, d = x.shape
    out = [*(jax.ShapeDtypeStruct((m, d), t) for t in dtypes), *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, h), (m, h, h)))]
    kernel = partial(_enter, n_iter=n_iter, hc_eps=hc_eps, rms_eps=rms_eps)
    *y, post, comb = launch(kernel, (2, m), out, [layer, x, products, scale, base, norm], name="hyper_enter", warps=8)
    return tuple(y), post, comb


def _enter(
    layer_ref: Any, x_ref: Any, product_ref: Any, scale_ref: Any, base_ref: Any, norm_ref: Any, *refs: Any,
    n_iter: int, hc_eps: float, rms_eps: float,
) -> None:  # fmt: skip
    *y_refs, post_ref, comb_ref = refs
    role, m, layer = pl.program_id(0), pl.program_id(1), layer_ref[0]
    _, h, d = x_ref.shape
    chunk, stream = jnp.arange(product_ref.shape[1]), jnp.arange(h)

    def mix(*groups: tuple[int, int]) -> list[jax.Array]:
        """Mixing weights before their sigmoid or softmax, H at a time: groups of first column and number of their scale."""
        # All loads come before the first sum, at which the warps wait for each other.
        squares = plt.load(product_ref.at[m, chunk, 2 * h + h * h])
        products = [plt.load(product_ref.at[m, chunk[:, None], first + stream[None, :]]) for first, _ in groups]
        scales, bases = [scale_ref[layer, i] for _, i in groups], [plt.load(base_ref.at[layer, first + stream]) for first, _ in groups]
        root = 1 / jnp.sqrt(jnp.sum(squares) / (h * d) + rms_eps)
        return [jnp.sum(p, axis=0) * root * s + b for p, s, b in zip(products, scales, bases, strict=True)]

    @pl.when(role == 0)
    def enter_block() -> None:
        x, weight = x_ref[m, :, :], norm_ref[layer, :]
        pre, post = mix((0, 0), (h, 1))
        pre = _sigmoid(pre) + hc_eps
        post_ref[m, :] = 2 * _sigmoid(post)
        y = jnp.sum(x * pre[:, None], axis=0)
        y = y * (1 / jnp.sqrt(jnp.sum(y * y) / d + rms_eps)) * weight
        for ref in y_refs:
            ref[m, :] = y.astype(ref.dtype)

    @pl.when(role == 1)
    def combination() -> None:
        # A list of rows, each spread over lanes: as a square, the matrix would change its layout twice in every iteration.
        e = [jnp.exp(row - jnp.max(row)) for row in mix(*((2 * h + j * h, 2) for j in range(h)))]
        c = _columns([row / jnp.sum(row) + hc_eps for row in e], hc_eps)

        def both(_: int, c: list[jax.Array]) -> list[jax.Array]:
            return _columns([row / (jnp.sum(row) + hc_eps) for row in c], hc_eps)

        for j, row in enumerate(lax.fori_loop(0, n_iter - 1, both, c)):
            comb_ref[m, j, :] = row


def _columns(rows: list[jax.Array], eps: float) -> list[jax.Array]:
    """Divide a matrix, given by its rows, by the sums of its columns."""
    total = sum(rows[1:], rows[0]) + eps
    return [row / total for row in rows]


def _sigmoid(z: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-z))
