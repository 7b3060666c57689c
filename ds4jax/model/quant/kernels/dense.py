"""Multiply a few rows by packed matrices, reading each weight once, in the layout of its file.

Up to FEW rows the weights meet the rows on the ordinary cores, where nothing but the memory limits; more rows go to the
tensor cores, for which tiles of weights are expanded in registers. Either way a row's sums run over its own numbers in an
order that no other row has a part in.
"""

from __future__ import annotations

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
PROGRAMS = 256  # of the second form: so many share the rows of weights, 16 to 64 each
GROUP = 32  # weights that share a scale in Q8_0
KINDS = ("Q8_0", "F16", "BF16", "F32")


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
    n_out = n if swiglu_clamp is None else n // 2
    statics: dict[str, Any] = {"n_out": n_out, "k": k, "per_group": n // groups, "clamp": swiglu_clamp, "kind": w.kind}
    fields = [w.fields["q"], w.fields["d"]] if w.kind == "Q8_0" else [w.fields["w"]]
    out = jax.ShapeDtypeStruct((m, n_out), out_dtype)
    if m <= FEW:
        rows, warps = max(1, min(TILE // k, 16)), 4 if k <= TILE else 8
        rows = _divisor(rows, n // groups, n_out)
        return launch(partial(_few, rows=rows, **statics), (n_out // rows,), out, [layer, x, *fields], name="dense", warps=warps)
    # float16 holds what meets float16 weights (it is normalised) with three more bits. Q8_0 is expanded to bfloat16: measured faster.
    x = x.astype(jnp.float16 if w.kind == "F16" else jnp.bfloat16)
    padded = max(16, 1 << (m - 1).bit_length())
    rows = _divisor(min(max(n_out // PROGRAMS, 16), 64), n // groups, n_out)
    depth, stages = (min(256, k), 3) if rows < 64 else (128, 4)
    kernel = partial(_many, rows=rows, padded=padded, depth=depth, **statics)
    return launch(kernel, (n_out // rows,), out, [layer, x, *fields], name="dense", stages=stages)


def _divisor(most: int, *sizes: int) -> int:
    """Largest power of two up to `most` that divides all sizes."""
    return next(r for r in (64, 32, 16, 8, 4, 2, 1) if r <= most and not any(size % r for size in sizes))


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


def _many(
    layer_ref: Any,
    x_ref: Any,
    *refs: Any,
    rows: int,
    padded: int,
    depth: int,
    n_out: int,
    k: int,
    per_group: int,
    clamp: float | None,
    kind: str,
) -> None:
    *fields, out_ref = refs
    layer, first = layer_ref[0], pl.program_id(0) * rows
    m = x_ref.shape[0]
    column = first // per_group * k
    member = jnp.arange(padded)

    def weights(first: jax.Array, at: jax.Array) -> jax.Array:
        w = fields[0][layer, pl.ds(first, rows), pl.ds(at, depth)]
        if kind != "Q8_0":
            return w.astype(x_ref.dtype)
        d = fields[1][layer, pl.ds(first, rows), pl.ds(at // GROUP, depth // GROUP)].astype(jnp.bfloat16)
        return (w.astype(jnp.bfloat16).reshape(rows, depth // GROUP, GROUP) * d[:, :, None]).reshape(rows, depth)

    def step(i: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = i * depth
        x = plt.load(x_ref.at[member[:, None], (column + at + jnp.arange(depth))[None, :]], mask=(member < m)[:, None], other=0.0)
        return tuple(t + plt.dot(weights(first + half * n_out, at), x, trans_b=True) for half, t in enumerate(totals))

    zero = jnp.zeros((rows, padded), jnp.float32)
    totals = jax.lax.fori_loop(0, k // depth, step, (zero,) if clamp is None else (zero, zero))
    y = totals[0] if clamp is None else swiglu(totals[0], totals[1], clamp)
    at = (member[None, :], (first + jnp.arange(rows))[:, None])
    plt.store(out_ref.at[at[0], at[1]], y.astype(out_ref.dtype), mask=(member < m)[None, :])
