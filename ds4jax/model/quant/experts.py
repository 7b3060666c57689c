"""Apply to each row the expert that was chosen for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ds4jax.model.quant.matmul import matmul
from ds4jax.model.quant.qtensor import QTensor, take_layer

MOST_ROWS = 64  # of a block
PAIRS_A_TURN = 16  # what an accelerator expands at a time; at the size of DeepSeek V4 Flash a quarter of a gigabyte of bfloat16
MANY_PAIRS = 512  # up to here an accelerator takes turns

# (packed weights [N, K] ..., rows [R, ...] ...) -> f32 [R, N'], each row by itself.
RowFunction = Callable[..., Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert", "order", "inverse", "block_expert", "block_start", "n_blocks"],
    meta_fields=["n_expert", "block_rows"],
)
@dataclass(frozen=True)
class RoutingPlan:
    """Which pairs (token, expert) go together; made once a layer.

    expert: i32 [P], n_expert where nobody is chosen; order: i32 [P], pairs sorted by expert; inverse: i32 [P], where each pair went.
    The sorted pairs of an expert are cut into blocks of block_rows: block_expert and block_start, i32 [most blocks], of which the
    first n_blocks (i32 []) are used.
    """

    n_expert: int
    block_rows: int
    expert: Array = field(repr=False)
    order: Array = field(repr=False)
    inverse: Array = field(repr=False)
    block_expert: Array = field(repr=False)
    block_start: Array = field(repr=False)
    n_blocks: Array = field(repr=False)


def route(expert: Array, n_expert: int) -> RoutingPlan:
    """Plan the work of pairs with expert i32 [P]. A value outside 0..n_expert-1 chooses nobody: the pair's result is 0."""
    (n_pairs,) = expert.shape
    rows = _block_rows(n_pairs, n_expert)
    expert = jnp.where((expert >= 0) & (expert < n_expert), expert, n_expert).astype(jnp.int32)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    count = jnp.sum(expert[:, None] == jnp.arange(n_expert)[None, :], axis=0, dtype=jnp.int32)  # [E]
    blocks = (count + rows - 1) // rows
    first_pair, last_block = jnp.cumsum(count) - count, jnp.cumsum(blocks)
    block = jnp.arange(n_pairs // rows + min(n_pairs, n_expert), dtype=jnp.int32)
    of = jnp.minimum(jnp.sum(last_block[None, :] <= block[:, None], axis=1, dtype=jnp.int32), n_expert - 1)
    return RoutingPlan(
        n_expert=n_expert,
        block_rows=rows,
        expert=expert,
        order=order,
        inverse=jnp.zeros_like(order).at[order].set(jnp.arange(n_pairs, dtype=jnp.int32), unique_indices=True),
        block_expert=of,
        block_start=first_pair[of] + rows * (block - (last_block - blocks)[of]),
        n_blocks=last_block[-1],
    )


def expert_apply(
    function: RowFunction, weights: Sequence[QTensor], rows: Sequence[Array], plan: RoutingPlan, layer: Array | int | None = None
) -> Array:
    """Apply function(weights of the pair's expert, the pair's rows): f32 [P, N'].

    Doing all of an expert's products in one visit decodes its weights once and keeps what is between them out of memory.

    Args:
        function: takes packed weights [N, K], then R rows of each of `rows`; treats every row by itself (as `matmul` does).
        weights: [E, N, K] each, or [L, E, N, K] with a layer index (may be traced). Only the chosen experts are read.
        rows: [P, ...] each.

    Returns:
        f32 [P, N'], 0 where nobody is chosen. A row depends on itself and its expert alone, bit for bit at a given P.
    """
    flat, first_expert = [], jnp.int32(0)
    for w in weights:
        if layer is not None:  # join the layer and the expert axis: an expert is one index away, and no layer is copied on the way
            first_expert = jnp.asarray(layer, jnp.int32) * plan.n_expert
            w = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w)
        flat.append(w)
    on_cpu = jax.default_backend() == "cpu"
    visit = _in_blocks if on_cpu or plan.expert.shape[0] > MANY_PAIRS else _in_turns
    y = visit(function, flat, rows, plan, first_expert)
    return jnp.where((plan.expert < plan.n_expert)[:, None], y, 0)


def expert_matmul(
    x: Array, w: QTensor, plan: RoutingPlan, layer: Array | int | None = None, *, out_dtype: DTypeLike | None = None
) -> Array:
    """Multiply each row of x [P, K] by its expert's matrix: [P, N] in `out_dtype` (default: x.dtype), accumulated in float32."""
    product = partial(matmul, out_dtype=jnp.float32)
    return expert_apply(lambda w, x: product(x, w), [w], [x], plan, layer).astype(out_dtype or x.dtype)


def _in_blocks(function: RowFunction, weights: Sequence[QTensor], rows: Sequence[Array], plan: RoutingPlan, first_expert: Array) -> Array:
    """Visit block after block, decoding its expert's weights once for all its rows."""
    n_pairs, n_rows = plan.order.shape[0], plan.block_rows
    # One block of slack: a block that is not full runs into the next expert's rows, whose own block comes later and overwrites that.
    ordered = [jnp.pad(a[plan.order], ((0, n_rows), *((0, 0),) * (a.ndim - 1))) for a in rows]

    def take(w: QTensor, b: Array | int) -> QTensor:
        return take_layer(w, first_expert + plan.block_expert[b])

    # Read a turn before it is decoded: fused with its slice, the k-quants' decoding is three times slower on a CPU. By columns nothing is.
    def read(b: Array | int) -> list[QTensor | None]:
        return [None if w.matrix else take(w, b) for w in weights]

    def block(b: Array, state: tuple[Array, list[QTensor | None]]) -> tuple[Array, list[QTensor | None]]:
        out, packed = state
        at = plan.block_start[b]
        now = [take(w, b) if one is None else one for w, one in zip(weights, packed, strict=True)]
        product = function(*now, *(lax.dynamic_slice_in_dim(a, at, n_rows) for a in ordered))
        return lax.dynamic_update_slice_in_dim(out, product, at, 0), read(b + 1)

    shape = jax.eval_shape(partial(_one_turn, function, weights), *(jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype) for a in rows))
    out = jnp.zeros((n_pairs + n_rows, shape.shape[-1]), jnp.float32)
    return lax.fori_loop(0, plan.n_blocks, block, (out, read(0)))[0][plan.inverse]


def _one_turn(function: RowFunction, weights: Sequence[QTensor], *rows: Array) -> Array:
    """Apply the first expert (for its result's shape alone)."""
    return function(*(take_layer(w, 0) for w in weights), *rows)


def _in_turns(function: RowFunction, weights: Sequence[QTensor], rows: Sequence[Array], plan: RoutingPlan, first_expert: Array) -> Array:
    """Visit PAIRS_A_TURN pairs at a time, an expert decoded for each, in a fixed number of turns.

    For accelerators: the loop of `_in_blocks` ends when the data says so, and asking the device that costs more than sharing saves.
    """
    (n_pairs,) = plan.expert.shape
    size = min(PAIRS_A_TURN, n_pairs)
    n_turns = -(-n_pairs // size)
    more = n_turns * size - n_pairs

    def cut(a: Array) -> Array:
        return jnp.pad(a, ((0, more), *((0, 0),) * (a.ndim - 1))).reshape(n_turns, size, *a.shape[1:])

    def turn(pairs: tuple[Array, ...]) -> Array:
        # Where nobody is chosen the index is n_expert: any expert will do.
        index = first_expert + jnp.minimum(pairs[0], plan.n_expert - 1)
        chosen = [jax.tree.map(lambda a: a.at[index].get(mode="promise_in_bounds"), w) for w in weights]
        return jax.vmap(function)(*chosen, *(a[:, None] for a in pairs[1:]))[:, 0]

    pairs = (cut(plan.expert), *map(cut, rows))
    y = turn(tuple(a[0] for a in pairs))[None] if n_turns == 1 else lax.map(turn, pairs)
    return y.reshape(n_turns * size, -1)[:n_pairs]


def _block_rows(n_pairs: int, n_expert: int) -> int:
    """Rows a block: the power of two that holds what an expert gets and a quarter more, so that most experts need one block."""
    expected = -(-5 * n_pairs // (4 * n_expert))
    return min(MOST_ROWS, 1 << (expected - 1).bit_length())
