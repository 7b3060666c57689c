"""Choose the compressed rows of a decode step, in three launches: queries, scores, the best k.

Where a session sees no more rows than it may choose, all three return at once. The best are found by narrowing an interval of
scores until k of them lie above it: no sort, and rows come out ascending.
"""

from __future__ import annotations

import math
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
from ds4jax.model.kernels.rows import HALF, RowLayout, read_keys, tile, used_position
from ds4jax.model.rounding import FP4_BLOCK, HADAMARD_WIDTH, exp2_int

RATIO = 4  # tokens a row, on every layer that has an indexer
QUERY_HEADS = 16  # of a program that prepares queries: few, where there are few tokens
MANY_TOKENS, MANY_HEADS = 128, 64  # from so many tokens on, so many heads share what a program makes first
SCORE_ROWS = 64  # of a program's tile
SCORE_WARPS = 4
SCORE_PROGRAMS = 256  # in all, at most: enough for every processor; sessions share them
SELECT_TILE = 4096  # scores read at a time
SELECT_WARPS = 16
DEPTH = 2  # a pass over the scores cuts the interval in 2**DEPTH
_TOP = (1 << 31) - 1


@dataclass(frozen=True)
class _Plan:
    """What the kernels know beforehand. heads: of the indexer, padded to what Triton multiplies."""

    keys: RowLayout
    n_slot: int
    n_head: int
    heads: int
    top_k: int

    def visible(self, slot_ref: Any, position_ref: Any, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return a batch row's slot, position and number of rows that it may see; none for a row that nobody uses."""
        slot, position = used_position(slot_ref, position_ref, row, self.n_slot)
        return slot, position, jnp.minimum((position + 1) // RATIO, self.keys.n_row)


def fits(keys: Rows) -> bool:
    """Whether `choose_rows` takes keys like these: rows of 128 channels."""
    return RowLayout.of(keys).width == HADAMARD_WIDTH and stored.addressable(keys)


def choose_rows(
    q: jax.Array,
    weight: jax.Array,
    keys: Rows,
    at_comp: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    *,
    top_k: int,
    omega: np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """Choose the rows that each of M tokens attends to: all that it sees, or the top_k best by score, the earlier of equals.

    Args:
        q: [M, I*J] f32, the projected index queries; they are rotated here and, for FP4 keys, mixed and rounded as those were.
        weight: [M, I] f32, the projected weights of the heads. keys: with more rows than top_k, else there is nothing to choose.
        at_comp: int32, one value, the layer of `keys`. slot, position: int32 [M]; a slot past the cache marks a row that nobody uses.
        omega: [R/2] f32 from `rope.frequencies`.

    Returns:
        row numbers int32 [M, top_k], ascending, and how many of them mean something, int32 [M].
    """
    m, n_head = weight.shape
    layout = RowLayout.of(keys)
    j = layout.width
    plan = _Plan(layout, next(iter(keys.parts.values())).shape[1], n_head, max(16, 1 << (n_head - 1).bit_length()), top_k)
    angles = np.zeros(j, np.float32)
    angles[j - keys.n_rot :] = np.repeat(omega, 2)

    queries = jax.ShapeDtypeStruct((m, 2, plan.heads, j // 2), jnp.bfloat16)
    operands = [q.reshape(m, n_head, j), jnp.asarray(angles), slot, position]
    heads = QUERY_HEADS if m < MANY_TOKENS else min(MANY_HEADS, plan.heads)
    query = launch(partial(_queries, plan=plan, heads=heads), (plan.heads // heads, m), queries, operands, name="index_query", warps=4)

    n_tile = pl.cdiv(layout.n_row, SCORE_ROWS)
    grid = (min(n_tile, max(4, SCORE_PROGRAMS // m)), m)
    scores = jax.ShapeDtypeStruct((m, n_tile * SCORE_ROWS), jnp.float32)
    operands = [query, weight, at_comp.reshape(1), slot, position, *stored.operands(keys)]
    score = launch(partial(_scores, plan=plan, programs=grid[0]), grid, scores, operands, name="index_score", warps=SCORE_WARPS)

    out = [jax.ShapeDtypeStruct((m, top_k), jnp.int32), jax.ShapeDtypeStruct((m,), jnp.int32)]
    return launch(partial(_select, plan=plan), (m,), out, [score, slot, position], name="index_select", warps=SELECT_WARPS)


def _queries(q_ref: Any, angle_ref: Any, slot_ref: Any, position_ref: Any, out_ref: Any, *, plan: _Plan, heads: int) -> None:
    """Rotate, mix and round the queries of some heads, and lay them out as the keys are read."""
    group, row = pl.program_id(0), pl.program_id(1)
    _, position, n = plan.visible(slot_ref, position_ref, row)
    head = group * heads + jnp.arange(heads)
    real = (head < plan.n_head)[:, None]

    def rotated(channel: jax.Array) -> jax.Array:
        """Load channels [C] of the heads and turn them by their angles, which are zero for those that do not rotate."""
        x, partner = (plt.load(q_ref.at[row, *tile(head, c)], mask=real, other=0.0) for c in (channel, channel ^ 1))
        theta = position.astype(jnp.float32) * plt.load(angle_ref.at[channel])
        sign = jnp.where(channel % 2 == 0, -1.0, 1.0)
        return x * jnp.cos(theta)[None, :] + partner * (sign * jnp.sin(theta))[None, :]

    def plain() -> None:
        column = jnp.arange(plan.keys.width // 2)
        for half in range(2):
            halved = rotated(half * column.shape[0] + column)
            plt.store(out_ref.at[row, half, *tile(head, column)], halved.astype(jnp.bfloat16))

    def rounded() -> None:
        x, inside = rotated(jnp.arange(plan.keys.width)), jnp.arange(FP4_BLOCK)
        for block in range(plan.keys.width // FP4_BLOCK):
            mixed = _fp4(_hadamard(x, block * FP4_BLOCK + inside))
            row_head, half = tile(head, inside // HALF)
            _, column = tile(head, block * HALF + inside % HALF)
            plt.store(out_ref.at[row, half, row_head, column], mixed.astype(jnp.bfloat16))

    pl.when(n > plan.top_k)(rounded if plan.keys.format == "fp4" else plain)


def _hadamard(x: jax.Array, column: jax.Array) -> jax.Array:
    """Compute columns [C] of `rounding.hadamard` of x [heads, 128] f32.

    Tensor cores multiply bfloat16, so x goes in three pieces of 8 bits that add up to it exactly; the matrix is plus or minus one.
    Sums differ from the butterflies' in their last bits.
    """
    odd = jax.lax.population_count(jnp.arange(HADAMARD_WIDTH)[:, None] & column[None, :]) & 1
    matrix = (1 - 2 * odd).astype(jnp.bfloat16)
    pieces = []
    for _ in range(3):
        # Cut, not rounded: a compiler may take a cast there and back for nothing to do.
        piece = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536), jnp.float32)
        pieces.append(piece.astype(jnp.bfloat16))
        x = x - piece
    high, middle, low = (plt.dot(piece, matrix) for piece in pieces)
    return (high + (middle + low)) * (1 / math.sqrt(HADAMARD_WIDTH))


def _fp4(x: jax.Array) -> jax.Array:
    """Round x [heads, 32] f32 as `rounding.fp4_sim` does, one block a head."""
    bits = jax.lax.bitcast_convert_type(jnp.maximum(jnp.max(jnp.abs(x), axis=1), 6 * 2.0**-126), jnp.int32)
    # The smallest power of two that brings the largest value to 6 = 1.5 * 2**2 or below.
    exponent = (bits >> 23) - 127 - 2 + (bits & 0x7FFFFF > 0x400000).astype(jnp.int32)
    y = jnp.abs(x) * exp2_int(-exponent)[:, None]
    # Halfway goes to the even code: up to 1.0, 2.0 and 4.0, down to the others.
    value = jnp.where(y > 0.25, 0.5, 0.0) + jnp.where(y >= 0.75, 0.5, 0.0) + jnp.where(y > 1.25, 0.5, 0.0) + jnp.where(y >= 1.75, 0.5, 0.0)
    value += jnp.where(y > 2.5, 1.0, 0.0) + jnp.where(y >= 3.5, 1.0, 0.0) + jnp.where(y > 5.0, 2.0, 0.0)
    return jnp.where(x < 0, -value, value) * exp2_int(exponent)[:, None]


def _scores(query_ref: Any, weight_ref: Any, at_ref: Any, slot_ref: Any, position_ref: Any, *refs: Any, plan: _Plan, programs: int) -> None:
    """Score every so-many-th tile of a batch row's keys."""
    *keys, score_ref = refs
    parts = dict(zip(plan.keys.names, keys, strict=True))
    first, row = pl.program_id(0), pl.program_id(1)
    slot, _, n = plan.visible(slot_ref, position_ref, row)
    n_tile = pl.cdiv(n, SCORE_ROWS)

    @pl.when((n > plan.top_k) & (first < n_tile))
    def some_tiles() -> None:
        head, column = jnp.arange(plan.heads), jnp.arange(plan.keys.width // 2)
        low, high = (query_ref[row, half, pl.ds(0, plan.heads), pl.ds(0, column.shape[0])] for half in range(2))
        weight = plt.load(weight_ref.at[row, head], mask=head < plan.n_head, other=0.0)
        weight = weight * (1.0 / math.sqrt(plan.n_head * plan.keys.width))

        def score(i: jax.Array, nothing: None) -> None:
            number = (first + i * programs) * SCORE_ROWS + jnp.arange(SCORE_ROWS)
            key_low, key_high = read_keys(parts, plan.keys, at_ref[0], slot, number, number < n)
            dot = plt.dot(key_low, low, trans_b=True) + plt.dot(key_high, high, trans_b=True)  # [rows, heads]
            total = jnp.sum(jnp.maximum(dot, 0.0) * weight[None, :], axis=1)
            plt.store(score_ref.at[row, number], jnp.where(total == 0.0, 0.0, total))  # -0.0 would order below 0.0

        jax.lax.fori_loop(0, pl.cdiv(n_tile - first, programs), score, None)


def _select(score_ref: Any, slot_ref: Any, position_ref: Any, row_ref: Any, n_ref: Any, *, plan: _Plan) -> None:
    """List the top_k rows of one batch row."""
    row, k = pl.program_id(0), plan.top_k
    _, _, n = plan.visible(slot_ref, position_ref, row)
    n_ref[row] = jnp.minimum(n, k)

    @pl.when(n <= k)
    def everything() -> None:
        number = jnp.arange(1 << (k - 1).bit_length())
        plt.store(row_ref.at[row, number], number, mask=number < k)

    @pl.when(n > k)
    def the_best() -> None:
        n_tile = pl.cdiv(n, SELECT_TILE)

        def read(t: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Return a tile's row numbers, which of them are live, and integers that order as their scores do."""
            number = t * SELECT_TILE + jnp.arange(SELECT_TILE)
            bits = jax.lax.bitcast_convert_type(plt.load(score_ref.at[row, number], mask=number < n, other=0.0), jnp.int32)
            order = bits ^ ((bits >> 31) & _TOP)
            return number, number < n, jnp.maximum(jnp.minimum(order, _TOP - 1), -_TOP)  # NaN is in the way of no bound

        def widen(t: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            _, live, order = read(t)
            return jnp.minimum(bounds[0], jnp.where(live, order, _TOP)), jnp.maximum(bounds[1], jnp.where(live, order, -_TOP))

        ends = (jnp.full(SELECT_TILE, _TOP, jnp.int32), jnp.full(SELECT_TILE, -_TOP, jnp.int32))
        least, largest = jax.lax.fori_loop(0, n_tile, widen, ends)

        def count(floors: list[jax.Array]) -> list[jax.Array]:
            """Count the scores that reach each floor."""

            def add(t: jax.Array, counts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                _, live, order = read(t)
                return tuple(c + (live & (order >= floor)).astype(jnp.int32) for c, floor in zip(counts, floors, strict=True))

            zeros = tuple(jnp.zeros(SELECT_TILE, jnp.int32) for _ in floors)
            return [jnp.sum(c) for c in jax.lax.fori_loop(0, n_tile, add, zeros)]

        # At least k scores reach `low`, fewer reach `high`: narrow until exactly k reach low, or none lies between the two.
        def goes_on(state: tuple[jax.Array, ...]) -> jax.Array:
            low, high, at_low, _ = state
            return (_middle(low, high) > low) & (at_low != k)

        def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            low, high, at_low, at_high = state
            floors = _cuts(low, high, DEPTH)
            for floor, reached in zip(floors, count(floors), strict=True):
                enough = reached >= k  # true up to some floor, then false: the last true one is the new low
                first_short = ~enough & (floor < high)
                low, at_low = jnp.where(enough, floor, low), jnp.where(enough, reached, at_low)
                high, at_high = jnp.where(first_short, floor, high), jnp.where(first_short, reached, at_high)
            return low, high, at_low, at_high

        start: tuple[jax.Array, ...] = (jnp.min(least), jnp.max(largest) + 1, n, jnp.int32(0))
        low, _, at_low, at_high = jax.lax.while_loop(goes_on, narrow, start)
        exact = at_low == k
        edge = jnp.where(exact, low - 1, low)  # all above it are chosen, and of those equal to it the first `spare`
        spare = jnp.where(exact, 0, k - at_high)

        def place(t: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            number, live, order = read(t)
            above, equal = live & (order > edge), live & (order == edge)
            n_above = jnp.cumsum(above.astype(jnp.int32)) + before[0]
            n_equal = jnp.cumsum(equal.astype(jnp.int32)) + before[1]
            keep = above | (equal & (n_equal <= spare))
            # Interpreted, a masked store puts back what it found: away with it from where the others store.
            at = jnp.where(keep, n_above + jnp.minimum(n_equal, spare) - 1, k)
            plt.store(row_ref.at[row, at], number, mask=keep)
            return before[0] + jnp.sum(above.astype(jnp.int32)), before[1] + jnp.sum(equal.astype(jnp.int32))

        jax.lax.fori_loop(0, n_tile, place, (jnp.int32(0), jnp.int32(0)))


def _middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """Return the mean of two integers, rounded down, without their sum, which could overflow."""
    return (low & high) + ((low ^ high) >> 1)


def _cuts(low: jax.Array, high: jax.Array, depth: int) -> list[jax.Array]:
    """Cut an interval in 2**depth and return the points between, ascending."""
    if depth == 0:
        return []
    middle = _middle(low, high)
    return [*_cuts(low, middle, depth - 1), middle, *_cuts(middle, high, depth - 1)]
