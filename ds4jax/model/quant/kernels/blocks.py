"""Cut the pairs (token, expert) of a prompt's chunk into blocks of one expert each, in two launches and without sorting."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch

TILE = 2048  # pairs looked at together


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Blocks of pairs that share an expert.

    expert: int32 [n], n_expert where a block is not used. pair: int32 [n, rows], token * X + choice, in that order within an expert;
    as many as there are pairs where a block has no more. Of a block that is not used unspecified.
    """

    expert: jax.Array = field(repr=False)
    pair: jax.Array = field(repr=False)


def cut_into_blocks(expert: jax.Array, n_expert: int, rows: int) -> Blocks:
    """Put pairs with experts int32 [P] into blocks of `rows`. A value outside 0..n_expert-1 chooses nobody: the pair is in no block."""
    (n_pair,) = expert.shape
    n_block = n_pair // rows + min(n_pair, n_expert)  # at most one of an expert's blocks is not full
    shape = jax.ShapeDtypeStruct
    tile = min(TILE, pl.next_power_of_2(n_pair))
    count = launch(partial(_count, tile=tile), (n_expert,), shape((n_expert,), jnp.int32), [expert], name="count_pairs")
    out = [shape((n_block,), jnp.int32), shape((n_block, rows), jnp.int32)]
    place = partial(_place, tile=tile)
    return Blocks(*launch(place, (n_expert + 1,), out, [expert, count], name="place_pairs"))


def _of(expert_ref: Any, first: Any, tile: int) -> tuple[jax.Array, jax.Array]:
    """Read a tile of pairs: their numbers and experts, -1 past the last."""
    pair = first + jnp.arange(tile)
    return pair, plt.load(expert_ref.at[pair], mask=pair < expert_ref.shape[0], other=-1)


def _count(expert_ref: Any, count_ref: Any, *, tile: int) -> None:
    """Count one expert's pairs."""
    e = pl.program_id(0)

    def step(i: jax.Array, count: jax.Array) -> jax.Array:
        return count + (_of(expert_ref, i * tile, tile)[1] == e).astype(jnp.int32)

    count = jax.lax.fori_loop(0, pl.cdiv(expert_ref.shape[0], tile), step, jnp.zeros(tile, jnp.int32))
    count_ref[e] = jnp.sum(count)


def _place(expert_ref: Any, count_ref: Any, block_ref: Any, pair_ref: Any, *, tile: int) -> None:
    """Write one expert's blocks; the program after the last expert marks the blocks that are left over."""
    e, (n_expert,), (n_pair,), (n_block, rows) = pl.program_id(0), count_ref.shape, expert_ref.shape, pair_ref.shape
    other = jnp.arange(pl.next_power_of_2(n_expert))
    count = plt.load(count_ref.at[other], mask=other < n_expert, other=0)
    blocks = pl.cdiv(count, rows)
    first = jnp.sum(jnp.where(other < e, blocks, 0))
    mine = jnp.where(e < n_expert, jnp.sum(jnp.where(other == e, blocks, 0)), n_block - first)

    def mark(b: jax.Array, _: None) -> None:
        block_ref[b] = e

    jax.lax.fori_loop(first, first + mine, mark, None)

    @pl.when(e < n_expert)
    def _() -> None:
        def step(i: jax.Array, n_placed: jax.Array) -> jax.Array:
            pair, expert = _of(expert_ref, i * tile, tile)
            chosen = expert == e
            place = n_placed + jnp.cumsum(chosen.astype(jnp.int32)) - 1
            # Interpreted, lanes that are masked out write back what they read: not where another lane writes.
            place = jnp.where(chosen, place, n_block * rows)
            plt.store(pair_ref.at[first + place // rows, place % rows], pair, mask=chosen)
            return n_placed + jnp.sum(chosen.astype(jnp.int32))

        n_placed = jax.lax.fori_loop(0, pl.cdiv(n_pair, tile), step, jnp.int32(0))
        place = n_placed + jnp.arange(rows)
        nobody = jnp.full(rows, n_pair, jnp.int32)
        plt.store(pair_ref.at[first + place // rows, place % rows], nobody, mask=place < mine * rows)
