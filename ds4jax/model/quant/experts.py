"""Multiply rows by the experts that were chosen for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ds4jax.model.quant.formats import dequantize
from ds4jax.model.quant.matmul import dot
from ds4jax.model.quant.qtensor import QTensor, take_layer

FEW_PAIRS = 4  # up to here a CPU expands an expert for each pair; beyond, decoding a shared expert once is faster
PAIRS_A_TURN = 16  # what an accelerator expands at a time; at the size of DeepSeek V4 Flash a quarter of a gigabyte of bfloat16
MANY_PAIRS = 512  # up to here an accelerator takes turns


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert", "order", "inverse", "group_expert", "group_start", "n_groups"],
    meta_fields=["n_expert"],
)
@dataclass(frozen=True)
class RoutingPlan:
    """Which pairs (token, expert) go together; made once a layer, used by gate, up and down.

    expert: i32 [P], n_expert where nobody is chosen; order: i32 [P], pairs sorted by expert; inverse: i32 [P], where each pair went.
    Pairs of one expert form a group: group_expert i32 [G], group_start i32 [G + 1] into the sorted pairs, G = min(P, n_expert), of which
    the first n_groups (i32 []) are used.
    """

    n_expert: int
    expert: Array = field(repr=False)
    order: Array = field(repr=False)
    inverse: Array = field(repr=False)
    group_expert: Array = field(repr=False)
    group_start: Array = field(repr=False)
    n_groups: Array = field(repr=False)


def route(expert: Array, n_expert: int) -> RoutingPlan:
    """Plan the products of pairs with expert i32 [P]. A value outside 0..n_expert-1 chooses nobody: the pair's result is 0."""
    (n_pairs,) = expert.shape
    n_groups = min(n_pairs, n_expert)
    expert = jnp.where((expert >= 0) & (expert < n_expert), expert, n_expert).astype(jnp.int32)
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    at = jnp.arange(n_pairs, dtype=jnp.int32)
    in_order = expert[order]
    first = jnp.concatenate([jnp.ones(1, bool), in_order[1:] != in_order[:-1]])
    (group_start,) = jnp.nonzero(first, size=n_groups + 1, fill_value=n_pairs)
    return RoutingPlan(
        n_expert=n_expert,
        expert=expert,
        order=order,
        inverse=jnp.zeros_like(order).at[order].set(at, unique_indices=True),
        group_expert=in_order[jnp.minimum(group_start[:-1], n_pairs - 1)],
        group_start=group_start.astype(jnp.int32),
        n_groups=jnp.sum(first & (in_order < n_expert), dtype=jnp.int32),
    )


def expert_matmul(
    x: Array, w: QTensor, plan: RoutingPlan, layer: Array | int | None = None, *, out_dtype: DTypeLike | None = None
) -> Array:
    """Multiply each row of x [P, K] by its expert's matrix: [P, N] in `out_dtype` (default: x.dtype), accumulated in float32.

    w: [E, N, K], or [L, E, N, K] with a layer index (may be traced). Only the chosen experts are read, never a layer's experts;
    [P, N, K] exists for a few pairs at a time. A row's result depends on that row and its expert alone, bit for bit at a given P.
    """
    w, first_expert = _flatten_layers(w, layer)
    n_pairs, on_cpu = x.shape[0], jax.default_backend() == "cpu"
    if n_pairs <= (FEW_PAIRS if on_cpu else PAIRS_A_TURN):
        y = _pairwise(x, w, first_expert, plan.expert, plan.n_expert)
    elif n_pairs <= MANY_PAIRS and not on_cpu:
        y = _pairwise_in_turns(x, w, first_expert, plan)
    else:
        y = _grouped(x, w, first_expert, plan)
    return jnp.where((plan.expert < plan.n_expert)[:, None], y, 0).astype(out_dtype or x.dtype)


def _pairwise(x: Array, w: QTensor, first_expert: Array | int, expert: Array, n_expert: int) -> Array:
    """Expand one expert for each pair, all at once: parallel, and little is lost as few pairs seldom share an expert."""
    # Where nobody is chosen the index is n_expert: any expert will do.
    index = first_expert + jnp.minimum(expert, n_expert - 1)
    weights = dequantize(jax.tree.map(lambda a: a.at[index].get(mode="promise_in_bounds"), w), x.dtype)
    return dot(x, weights, pairwise=True)


def _pairwise_in_turns(x: Array, w: QTensor, first_expert: Array | int, plan: RoutingPlan) -> Array:
    """Expand PAIRS_A_TURN experts at a time, a fixed number of times.

    For accelerators: the loops of `_grouped` end when the data says so, and asking the device that costs more than sharing saves.
    """
    n_pairs, k = x.shape
    n_turns = -(-n_pairs // PAIRS_A_TURN)
    more = n_turns * PAIRS_A_TURN - n_pairs
    rows = jnp.pad(x, ((0, more), (0, 0))).reshape(n_turns, PAIRS_A_TURN, k)
    expert = jnp.pad(plan.expert, (0, more), constant_values=plan.n_expert).reshape(n_turns, PAIRS_A_TURN)
    y = lax.map(lambda turn: _pairwise(turn[0], w, first_expert, turn[1], plan.n_expert), (rows, expert))
    return y.reshape(n_turns * PAIRS_A_TURN, -1)[:n_pairs]


def _grouped(x: Array, w: QTensor, first_expert: Array | int, plan: RoutingPlan) -> Array:
    """Expand each chosen expert once and multiply its rows in blocks of a fixed size."""
    n_pairs, _ = x.shape
    n_rows = _block_rows(n_pairs, plan.n_expert)
    # One block of slack: the last block of a group runs into the next group's rows, whose own blocks come later and overwrite that.
    rows = jnp.pad(x[plan.order], ((0, n_rows), (0, 0)))

    def group(g: Array, carry: tuple[QTensor, Array]) -> tuple[QTensor, Array]:
        packed, out = carry
        weights = dequantize(packed, x.dtype)
        start = plan.group_start[g]

        def block(b: Array, out: Array) -> Array:
            at = start + b * n_rows
            product = dot(lax.dynamic_slice_in_dim(rows, at, n_rows), weights)
            return lax.dynamic_update_slice_in_dim(out, product, at, 0)

        n_blocks = (plan.group_start[g + 1] - start + n_rows - 1) // n_rows
        out = lax.fori_loop(0, n_blocks, block, out)
        # Carried packed to the next turn: fused with its slice, the k-quants' expansion is three times slower on a CPU.
        return read(g + 1), out

    def read(g: Array | int) -> QTensor:
        """Packed matrix of a group; past the last group the index is clamped and the result unused."""
        return take_layer(w, first_expert + jnp.minimum(plan.group_expert[g], plan.n_expert - 1))

    out = jnp.zeros((n_pairs + n_rows, w.shape[-2]), jnp.float32)
    _, out = lax.fori_loop(0, plan.n_groups, group, (read(0), out))
    return out[plan.inverse]


def _block_rows(n_pairs: int, n_expert: int) -> int:
    """Rows a block: about as many as an expert gets, where a CPU's product is still cheap for one row and good for many."""
    return min(64, max(8, 1 << (n_pairs // n_expert).bit_length()))


def _flatten_layers(w: QTensor, layer: Array | int | None) -> tuple[QTensor, Array | int]:
    """Join the layer and the expert axis: an expert is then one index away, and no layer is copied on the way to it."""
    if layer is None:
        return w, 0
    n_expert = w.shape[-3]
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w), jnp.asarray(layer, jnp.int32) * n_expert
