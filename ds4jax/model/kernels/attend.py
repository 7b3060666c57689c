"""Attend with one token a row, in two launches: parts of the rows apart, then their sum.

Rows are few and far between (a window of 128, then 512 chosen ones or one for every 128 tokens), and each is key and value of all
heads. A program takes some heads and some tiles of one session's rows. Each session spreads the tiles that are live over all the
parts there are, so that neither a long capacity nor a neighbour costs it anything; programs without a tile return at once.
Logits are in units of log2 e throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.cache import Rows
from ds4jax.model.kernels import rows as stored
from ds4jax.model.kernels.launch import launch
from ds4jax.model.kernels.rows import RowLayout, read_blocks, tile, used_position

LOG2_E = math.log2(math.e)
# A weight is 2**(logit - base) with the base so far below the largest logit: in float16 small weights times small scales keep their
# bits, and 2**7 times the largest scale of what float16 rows hold (2**8) is still finite.
HEADROOM = 7.0
NOTHING = -1e30  # below any logit, and finite: differences of it are no NaN
CHANNELS = 64  # of a head that one program of the sum takes


@dataclass(frozen=True)
class Tiling:
    """How a launch is cut: heads and rows of a tile, parts that a session's tiles are spread over, heads of a program of the sum."""

    heads: int
    rows: int
    parts: int
    warps: int
    sum_heads: int


def tiling(m: int) -> Tiling:
    """Choose the tiles for m batch rows: many small programs for few rows, whole sessions for many."""
    if m <= 2:
        return Tiling(heads=16, rows=32, parts=20, warps=4, sum_heads=2)
    if m <= 8:
        return Tiling(heads=16, rows=64, parts=10, warps=4, sum_heads=4)
    if m <= 24:
        return Tiling(heads=32, rows=64, parts=4, warps=8, sum_heads=8)
    return Tiling(heads=32, rows=64, parts=2, warps=8, sum_heads=16)


@dataclass(frozen=True)
class _Plan:
    """What both kernels know beforehand."""

    n_head: int
    ratio: int
    eps: float
    window: int
    n_slot: int
    n_chosen: int  # capacity of the list of chosen rows; 0: all visible rows
    raw: RowLayout
    comp: RowLayout | None
    tiles: Tiling

    @property
    def n_comp_max(self) -> int:
        if self.comp is None:
            return 0
        return self.n_chosen or self.comp.n_row

    @property
    def parts(self) -> int:
        return min(self.tiles.parts, pl.cdiv(self.window, self.tiles.rows) + pl.cdiv(self.n_comp_max, self.tiles.rows))

    @property
    def padded_heads(self) -> int:
        return pl.cdiv(self.n_head, self.tiles.heads) * self.tiles.heads

    def live(self, position: jax.Array, n_chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Count a session's rows of the window, its compressed rows, its tiles of the window, and the tiles that a part takes."""
        n_raw = jnp.minimum(position + 1, self.window)
        n_comp = jnp.int32(0)
        if self.comp is not None:
            n_comp = n_chosen if self.n_chosen else jnp.minimum((position + 1) // self.ratio, self.comp.n_row)
        raw_tiles = pl.cdiv(n_raw, self.tiles.rows)
        return n_raw, n_comp, raw_tiles, pl.cdiv(raw_tiles + pl.cdiv(n_comp, self.tiles.rows), self.parts)


def fits(raw: Rows, comp: Rows | None, n_head: int) -> bool:
    """Whether `attend` takes these rows; the number of heads must be a power of two."""
    return n_head & (n_head - 1) == 0 and all(stored.fits(rows) for rows in (raw, comp) if rows is not None)


def attend(
    q: jax.Array,
    sinks: jax.Array,
    raw: Rows,
    comp: Rows | None,
    chosen: tuple[jax.Array, jax.Array] | None,
    at_raw: jax.Array,
    at_comp: jax.Array,
    layer: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    *,
    n_head: int,
    ratio: int,
    omega: np.ndarray,
    eps: float,
    tiles: Tiling | None = None,
) -> jax.Array:
    """Attend to the window and the compressed rows of each batch row's slot, for M rows of one token each.

    Args:
        q: [M, N*K] f32, projected; the head's norm and rotation are done here. sinks: [L, N] f32.
        raw: the ring of the last W rows, in which the token itself is written already. comp: compressed rows, None without.
        chosen: row numbers int32 [M, k] and how many of them int32 [M]; None to attend to all that are visible.
        at_raw, at_comp, layer: int32, one value each: which layer of `raw`, of `comp`, of `sinks`.
        slot, position: int32 [M]; a slot past the cache marks a row that nobody uses: what it gives is unspecified.
        ratio: tokens a compressed row. omega: [R/2] f32 from `rope.frequencies`. eps: of the norm.

    Returns:
        [M, N*K] bf16, rotated back.
    """
    m, k = q.shape[0], q.shape[1] // n_head
    window = RowLayout.of(raw)
    compressed = None if comp is None else RowLayout.of(comp)
    n_chosen = 0 if chosen is None else chosen[0].shape[1]
    n_slot = next(iter(raw.parts.values())).shape[1]
    plan = _Plan(n_head, ratio, eps, window.n_row, n_slot, n_chosen, window, compressed, tiles or tiling(m))

    angles = np.zeros(k, np.float32)  # plain channels turn by nothing
    angles[k - raw.n_rot :] = np.repeat(omega, 2)
    where = [jnp.asarray(angles), at_raw.reshape(1), at_comp.reshape(1), slot, position]
    picked = [] if chosen is None else [chosen[0], chosen[1]]
    parts, heads = plan.parts, plan.padded_heads
    out = [jax.ShapeDtypeStruct((m, parts, heads, k), jnp.float32), *[jax.ShapeDtypeStruct((m, parts, heads), jnp.float32)] * 2]
    operands = [q.reshape(m, n_head, k), *where, *picked, *stored.operands(raw), *([] if comp is None else stored.operands(comp))]
    grid = (heads // plan.tiles.heads, parts, m)
    value, base, total = launch(partial(_part, plan=plan), grid, out, operands, name="attend_part", warps=plan.tiles.warps)

    sum_heads = min(plan.tiles.sum_heads, n_head)
    operands = [value, base, total, sinks, layer.reshape(1), jnp.asarray(angles), slot, position, *picked[1:]]
    grid = (pl.cdiv(k, CHANNELS), n_head // sum_heads, m)
    whole = jax.ShapeDtypeStruct((m, n_head, k), jnp.bfloat16)
    return launch(partial(_sum, plan=plan, heads=sum_heads), grid, whole, operands, name="attend_sum", warps=1).reshape(m, n_head * k)


def _part(*refs: Any, plan: _Plan) -> None:
    """Attend with some heads of a batch row to its share of the live tiles."""
    q_ref, angle_ref, at_raw_ref, at_comp_ref, slot_ref, position_ref, *rest = refs
    *rest, value_ref, base_ref, total_ref = rest
    picked, rest = (rest[:2], rest[2:]) if plan.n_chosen else ([], rest)
    raw = dict(zip(plan.raw.names, rest, strict=False))
    comp = dict(zip(plan.comp.names, rest[len(plan.raw.names) :], strict=True)) if plan.comp else {}

    group, part, row = (pl.program_id(i) for i in range(3))
    slot, position = used_position(slot_ref, position_ref, row, plan.n_slot)
    n_raw, n_comp, raw_tiles, share = plan.live(position, picked[1][row] if picked else jnp.int32(0))
    n_tile = raw_tiles + pl.cdiv(n_comp, plan.tiles.rows)
    first = part * share

    @pl.when(first < n_tile)
    def _() -> None:
        last = jnp.minimum(first + share, n_tile)
        q = _queries(q_ref, angle_ref, row, group * plan.tiles.heads, position, plan)
        state = (
            jnp.full(plan.tiles.heads, NOTHING, jnp.float32),
            jnp.zeros(plan.tiles.heads, jnp.float32),
            *(jnp.zeros(block.shape, jnp.float32) for block in q),
        )
        offset = jnp.arange(plan.tiles.rows)

        def window_tile(t: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number = t * plan.tiles.rows + offset
            seen = number < n_raw
            return _absorb(state, q, read_blocks(raw, plan.raw, at_raw_ref[0], slot, number, seen), seen)

        state = jax.lax.fori_loop(first, jnp.minimum(last, raw_tiles), window_tile, state)
        if plan.comp is not None:
            layout = plan.comp

            def comp_tile(t: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                number = (t - raw_tiles) * plan.tiles.rows + offset
                seen = number < n_comp
                if picked:
                    number = plt.load(picked[0].at[row, number], mask=seen, other=0)
                return _absorb(state, q, read_blocks(comp, layout, at_comp_ref[0], slot, number, seen), seen)

            state = jax.lax.fori_loop(jnp.maximum(first, raw_tiles), last, comp_tile, state)
        base, total, *values = state
        heads = pl.ds(group * plan.tiles.heads, plan.tiles.heads)
        base_ref[row, part, heads] = base
        total_ref[row, part, heads] = total
        for (channel, width), value in zip(plan.raw.blocks, values, strict=True):
            value_ref[row, part, heads, pl.ds(channel, width)] = value


def _queries(q_ref: Any, angle_ref: Any, row: jax.Array, head: jax.Array, position: jax.Array, plan: _Plan) -> list[jax.Array]:
    """Norm and rotate the queries of some heads: a tile [heads, width] for each block of channels, with the logits' scale in it."""
    layout = plan.raw
    heads = head + jnp.arange(plan.tiles.heads)

    def load(channel: jax.Array) -> jax.Array:
        return plt.load(q_ref.at[row, *tile(heads, channel)], mask=(heads < plan.n_head)[:, None], other=0.0)

    tiles = [load(first + jnp.arange(width)) for first, width in layout.blocks]
    square = sum(jnp.sum(x * x, axis=1) for x in tiles)
    factor = jax.lax.rsqrt(square * (1.0 / layout.width) + plan.eps) * (LOG2_E / math.sqrt(layout.width))
    first, width = layout.blocks[-1]
    channel = first + jnp.arange(width)
    tiles[-1] = _turn(tiles[-1], load(channel ^ 1), channel, position.astype(jnp.float32) * angle_ref[pl.ds(first, width)])
    return [(x * factor[:, None]).astype(layout.dtype) for x in tiles]


def _turn(x: jax.Array, partner: jax.Array, channel: jax.Array, theta: jax.Array) -> jax.Array:
    """Rotate channels [.., C] by theta [C]; partner holds for each channel the other one of its pair."""
    sign = jnp.where(channel % 2 == 0, -1.0, 1.0)
    return x * jnp.cos(theta)[None, :] + partner * (sign * jnp.sin(theta))[None, :]


def _absorb(
    state: tuple[jax.Array, ...], q: Sequence[jax.Array], blocks: Sequence[tuple[jax.Array, jax.Array | None]], seen: jax.Array
) -> tuple[jax.Array, ...]:
    """Add a tile of rows [R] to the running softmax of some heads: its base and sum [heads], and sums of values [heads, width]."""
    base, total, *values = state
    logit = jnp.zeros((q[0].shape[0], seen.shape[0]), jnp.float32)
    for query, (x, scale) in zip(q, blocks, strict=True):
        product = plt.dot(query, x, trans_b=True)
        logit += product if scale is None else product * scale[None, :]
    logit = jnp.where(seen[None, :], logit, NOTHING)
    raised = jnp.maximum(base, jnp.max(logit, axis=1) - HEADROOM)
    weight = jnp.where(seen[None, :], jnp.exp2(logit - raised[:, None]), 0.0)
    decay = jnp.exp2(base - raised)
    new = []
    for value, (x, scale) in zip(values, blocks, strict=True):
        w = weight if scale is None else weight * scale[None, :]
        new.append(value * decay[:, None] + plt.dot(w.astype(x.dtype), x))
    return raised, total * decay + jnp.sum(weight, axis=1), *new


def _sum(*refs: Any, plan: _Plan, heads: int) -> None:
    """Add the parts of some channels of some heads and the sink, and rotate them back."""
    value_ref, base_ref, total_ref, sink_ref, layer_ref, angle_ref, slot_ref, position_ref, *picked, out_ref = refs
    block, group, row = (pl.program_id(i) for i in range(3))
    _, position = used_position(slot_ref, position_ref, row, plan.n_slot)
    _, n_comp, raw_tiles, share = plan.live(position, picked[0][row] if picked else jnp.int32(0))
    live = pl.cdiv(raw_tiles + pl.cdiv(n_comp, plan.tiles.rows), share)

    head = group * heads + jnp.arange(heads)
    channel = block * CHANNELS + jnp.arange(CHANNELS)
    inside = channel < plan.raw.width

    sink = sink_ref[layer_ref[0], pl.ds(group * heads, heads)] * LOG2_E
    bases = [plt.load(base_ref.at[row, s, head], mask=jnp.full(heads, s < live), other=NOTHING) for s in range(plan.parts)]
    top = sink
    for base in bases:
        top = jnp.maximum(top, base)
    total, value, partner = jnp.exp2(sink - top), jnp.zeros((heads, CHANNELS), jnp.float32), jnp.zeros((heads, CHANNELS), jnp.float32)
    for s, base in enumerate(bases):
        weight = jnp.where(s < live, jnp.exp2(base - top), 0.0)
        total += weight * plt.load(total_ref.at[row, s, head], mask=jnp.full(heads, s < live), other=0.0)
        mask = inside[None, :] & jnp.full((heads, CHANNELS), s < live)
        value += weight[:, None] * plt.load(value_ref.at[row, s, *tile(head, channel)], mask=mask, other=0.0)
        partner += weight[:, None] * plt.load(value_ref.at[row, s, *tile(head, channel ^ 1)], mask=mask, other=0.0)
    theta = position.astype(jnp.float32) * plt.load(angle_ref.at[channel], mask=inside, other=0.0)
    result = _turn(value, partner, channel, -theta) / total[:, None]
    plt.store(out_ref.at[row, *tile(head, channel)], result.astype(jnp.bfloat16), mask=inside[None, :] & jnp.full((heads, CHANNELS), True))
