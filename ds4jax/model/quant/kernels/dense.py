"""Multiply a few rows by packed matrices, reading each weight once, in the layout of its file.

Up to FEW rows the weights meet the rows on the ordinary cores, where nothing but the memory limits; more rows go to the
tensor cores, for which tiles of weights are expanded in registers. Either way a row's sums run over its own numbers in an
order that no other row has a part in.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from ds4jax.model.kernels.launch import launch
from ds4jax.model.quant.qtensor import QTensor

FEW = 2  # rows that do without tensor cores
MOST = 128  # rows of a launch
TILE = 8192  # weights that a program of the first form reads at once
MOST_PARTS = 8  # of a sum
GROUP = 32  # weights that share a scale in Q8_0
KINDS = ("Q8_0", "F16", "BF16", "F32")


@dataclass(frozen=True)
class Tile:
    """How a product of more than FEW rows is cut.

    rows: of weights, of a program; parts: runs of a row's values, each a program's; depth: values of a step; warps; stages of the loads.
    """

    rows: int
    parts: int
    depth: int
    warps: int
    stages: int


def fits(w: QTensor, n_rows: int, groups: int = 1) -> bool:
    """Whether `dense_matmul` takes stacked weights w [L, N, K] and so many rows."""
    _, n, k = w.shape
    return w.kind in KINDS and n_rows <= MOST and k >= 128 and k & (k - 1) == 0 and n % (16 * groups) == 0


def dense_matmul(
    x: jax.Array, w: QTensor, layer: jax.Array, *, groups: int = 1, swiglu_clamp: float | None = None, out_dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Multiply x [M, groups * K] by layer `layer` (int32 [1]) of w [L, N, K]: [M, N] in out_dtype, summed in float32.

    groups: the rows of w are as many groups, and group g multiplies the g-th K columns of x.
    swiglu_clamp: the first half of w's rows is a gate, the second what it lets through: [M, N / 2] (see `moe.swiglu`).
    """
    (m, _), (_, n, k) = x.shape, w.shape
    if m > FEW:
        y = sum_parts(dense_parts(x, w, layer, groups=groups))
        return (y if swiglu_clamp is None else swiglu(y[:, : n // 2], y[:, n // 2 :], swiglu_clamp)).astype(out_dtype)
    n_out = n if swiglu_clamp is None else n // 2
    rows, warps = _divisor(max(1, min(TILE // k, 16)), n // groups, n_out), 4 if k <= TILE else 8
    kernel = partial(_few, rows=rows, n_out=n_out, k=k, per_group=n // groups, clamp=swiglu_clamp, kind=w.kind)
    out = jax.ShapeDtypeStruct((m, n_out), out_dtype)
    return launch(kernel, (n_out // rows,), out, [layer, x, *_fields(w)], name="dense", warps=warps)


def dense_parts(x: jax.Array, w: QTensor, layer: jax.Array, *, groups: int = 1) -> jax.Array:
    """Compute `dense_matmul` but for its last sum, for what can add as it reads: f32 [M, `n_parts`(M, w), N]."""
    (m, _), (_, n, k) = x.shape, w.shape
    if m <= FEW:
        return dense_matmul(x, w, layer, groups=groups)[:, None]
    x = x.astype(taken_dtype(m, w))
    tile = _tile(m, n, k)
    rows = _divisor(tile.rows, n // groups)
    kernel = partial(_many, rows=rows, padded=_padded(m), depth=tile.depth, k=k, per_group=n // groups, kind=w.kind)
    out = jax.ShapeDtypeStruct((m, tile.parts, n), jnp.float32)
    return launch(kernel, (n // rows, tile.parts), out, [layer, x, *_fields(w)], name="dense", warps=tile.warps, stages=tile.stages)


def taken_dtype(m: int, w: QTensor) -> DTypeLike:
    """Type that m rows are best in when they meet w; others are cast."""
    if m <= FEW:
        return jnp.float32
    # float16 holds what meets float16 weights (it is normalised) with three more bits. Q8_0 is expanded to bfloat16: measured faster.
    return jnp.float16 if w.kind == "F16" else jnp.bfloat16


def n_parts(m: int, w: QTensor) -> int:
    """Parts in which `dense_parts` leaves a product of m rows by w [L, N, K]."""
    return _tile(m, *w.shape[1:]).parts if m > FEW else 1


def sum_parts(parts: jax.Array) -> jax.Array:
    """Add up parts [M, P, N]: [M, N]. Term by term: elementwise sums fuse with what comes next, in one order."""
    return sum((parts[:, i] for i in range(1, parts.shape[1])), parts[:, 0])


def _tile(m: int, n: int, k: int) -> Tile:
    """Choose how m rows of x meet n rows of k weights; measured at 16 and 64 rows.

    Each program reads its share of x anew, which at 64 rows is more than its weights: so many rows of weights a program, and then parts of
    the sums, until there are programs enough to fill the GPU.
    """
    if _padded(m) <= 32:
        rows, enough, depth, warps, stages = 32, 512, 128, 4, 4
    elif n >= 128 * 160:
        rows, enough, depth, warps, stages = 128, 160, 128, 8, 3
    else:
        rows, enough, depth, warps, stages = 64, 160, 128, 4, 3
    rows, depth = _divisor(min(rows, max(n // 16, 16)), n), min(depth, k)
    most = max(k // depth // 2, 1)  # two steps of a program at least
    return Tile(rows, min(pl.next_power_of_2(pl.cdiv(enough * rows, n)), MOST_PARTS, most), depth, warps, stages)


def _padded(m: int) -> int:
    return max(16, pl.next_power_of_2(m))


def _fields(w: QTensor) -> list[jax.Array]:
    return [w.fields["q"], w.fields["d"]] if w.kind == "Q8_0" else [w.fields["w"]]


def _divisor(most: int, *sizes: int) -> int:
    """Largest power of two up to `most` that divides all sizes."""
    return next(r for r in (128, 64, 32, 16, 8, 4, 2, 1) if r <= most and not any(size % r for size in sizes))


def swiglu(gate: jax.Array, up: jax.Array, clamp: float) -> jax.Array:
    """Compute `moe.swiglu`. With comparisons, for NaN to pass: a GPU's minimum and maximum would replace it by the clamp."""
    gate = jnp.where(gate > clamp, clamp, gate)
    up = jnp.where(up > clamp, clamp, jnp.where(up < -clamp, -clamp, up))
    return gate / (1 + jnp.exp(-gate)) * up


def _few(layer_ref: Any, x_ref: Any, *refs: Any, rows: int, n_out: int, k: int, per_group: int, clamp: float | None, kind: str) -> None:
    *fields, out_ref = refs
    layer, first = layer_ref[0], pl.program_id(0) * rows
    n_group = k // GROUP
    at = jnp.arange(n_group)[:, None] * GROUP + jnp.arange(GROUP)[None, :]

    def product(first: jax.Array, x: jax.Array) -> jax.Array:
        row = first + jnp.arange(rows)
        w = plt.load(fields[0].at[layer, row[:, None, None], at[None]]).astype(jnp.float32)  # [rows, n_group, GROUP]
        sums = jnp.sum(w * x[None], axis=2)
        if kind == "Q8_0":
            sums = sums * plt.load(fields[1].at[layer, row[:, None], jnp.arange(n_group)[None, :]]).astype(jnp.float32)
        return jnp.sum(sums, axis=1)

    column = first // per_group * k
    for m in range(x_ref.shape[0]):
        x = plt.load(x_ref.at[m, column + at]).astype(jnp.float32)
        y = product(first, x)
        if clamp is not None:
            y = swiglu(y, product(first + n_out, x), clamp)
        out_ref[m, pl.ds(first, rows)] = y.astype(out_ref.dtype)


def _many(layer_ref: Any, x_ref: Any, *refs: Any, rows: int, padded: int, depth: int, k: int, per_group: int, kind: str) -> None:
    *fields, out_ref = refs
    layer, row, part = layer_ref[0], pl.ds(pl.program_id(0) * rows, rows), pl.program_id(1)
    m, n_step = x_ref.shape[0], k // depth // out_ref.shape[1]
    column = row.start // per_group * k
    member = jnp.arange(padded)

    def weights(at: jax.Array) -> jax.Array:
        w = fields[0][layer, row, pl.ds(at, depth)]
        if kind != "Q8_0":
            return w.astype(x_ref.dtype)
        d = fields[1][layer, row, pl.ds(at // GROUP, depth // GROUP)].astype(jnp.bfloat16)
        return (w.astype(jnp.bfloat16).reshape(rows, depth // GROUP, GROUP) * d[:, :, None]).reshape(rows, depth)

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        at = (part * n_step + i) * depth
        x = plt.load(x_ref.at[member[:, None], (column + at + jnp.arange(depth))[None, :]], mask=(member < m)[:, None], other=0.0)
        return total + plt.dot(weights(at), x, trans_b=True)

    total = jax.lax.fori_loop(0, n_step, step, jnp.zeros((rows, padded), jnp.float32))
    at = (row.start + jnp.arange(rows))[:, None]
    plt.store(out_ref.at[member[None, :], part, at], total, mask=(member < m)[None, :])
