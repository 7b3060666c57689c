"""The lightning indexer: which compressed rows a ratio-4 layer attends to.

While a query sees no more than top-k rows it takes them all; beyond that it takes the k best by score. Picks come
sorted by row number, so the order of the attention's sums does not depend on scores or on the other rows of a batch.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.config import ModelConfig
from ds4jax.model.cache import Rows
from ds4jax.model.compressor import Compressor
from ds4jax.model.rope import frequencies, rotate
from ds4jax.model.rounding import fp4_sim, hadamard
from ds4jax.model.softmax import products
from ds4jax.model.sums import ordered_sum
from ds4jax.model.weights import Take

NO_ROW = jnp.iinfo(jnp.int32).max
TILE = 128  # rows scored at a time, at least: bounds scratch, and lets the cost follow the live rows


class Indexer(nnx.Module):
    """Weights of the indexer, its queries and the choice of rows."""

    def __init__(self, config: ModelConfig, take: Take, prefix: str, *, rounded: bool) -> None:
        self.config, self.rounded = config, rounded
        i, j = config.n_index_head, config.index_dim
        self.attn_q_b = nnx.Param(take.matrix(f"{prefix}.attn_q_b.weight", i * j, config.q_lora_rank))
        self.compressor = Compressor(config, take, f"{prefix}_compressor", 4, j, with_hadamard=rounded)

    def inputs(self, prefix: str) -> dict[str, int]:
        """Name the matrices that project the block's input, with their rows: the compressor's two, then the heads' weights."""
        return self.compressor.inputs(f"{prefix}_compressor") | {f"{prefix}.proj.weight": self.config.n_index_head}

    def queries(self, q: jax.Array, weight: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finish the index queries and the weight of each indexer head.

        Args:
            q: [M, I*J] f32, the low-rank query times `attn_q_b`. weight: [M, I] f32, projected too. position: int32 [M].

        Returns:
            queries [M, I, J] f32 and weights [M, I] f32; both scales (1/sqrt(J), 1/sqrt(I)) are in the weights.
        """
        i, j = self.config.n_index_head, self.config.index_dim
        q = rotate(q.reshape(-1, i, j), position[:, None], frequencies(self.config, compressed=True))
        if self.rounded:
            q = fp4_sim(hadamard(q))
        return q, weight * (1.0 / (i * j) ** 0.5)

    def choose(self, keys: Rows, layer: jax.Array, slot: jax.Array, query: jax.Array, weight: jax.Array, n_visible: jax.Array) -> jax.Array:
        """Choose the compressed rows of every query.

        Args:
            keys: indexer keys; layer: index among ratio-4 layers; slot: int32 [B].
            query: [B, T, I, J]; weight: [B, T, I]; n_visible: int32 [B, T], rows that a query may see.

        Returns:
            int32 [B, T, k], ascending row numbers, NO_ROW where fewer than k are visible. k = min(top_k, row capacity).
        """
        k = min(self.config.index_top_k, keys.n_row)
        first = jnp.broadcast_to(jnp.arange(k), (*n_visible.shape, k))
        everything = jnp.where(first < n_visible[:, :, None], first, NO_ROW)
        if keys.n_row <= self.config.index_top_k:
            return everything
        select = partial(self._select, keys, layer, slot, query, weight, n_visible, k)
        return jax.lax.cond(jnp.any(n_visible > k), select, lambda: everything)

    def _select(
        self, keys: Rows, layer: jax.Array, slot: jax.Array, query: jax.Array, weight: jax.Array, n_visible: jax.Array, k: int
    ) -> jax.Array:
        """Scan the live rows tile by tile, keeping the k best seen so far; ties go to the lower row."""
        n_tile_rows = min(max(TILE, k), keys.n_row)
        n_tile = (jnp.max(n_visible) + n_tile_rows - 1) // n_tile_rows

        def tile(t: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row = t * n_tile_rows + jnp.arange(n_tile_rows)
            key = keys.read(layer, slot[:, None], row[None, :])  # [B, n, J]
            score = index_scores(query, weight, key)  # [B, T, n]
            seen = row[None, None, :] < n_visible[:, :, None]
            score = jnp.concatenate([best[0], jnp.where(seen, score, -jnp.inf)], axis=-1)
            number = jnp.concatenate([best[1], jnp.where(seen, row[None, None, :], NO_ROW)], axis=-1)
            # Earlier rows stand first, and top_k keeps the first of equals.
            top, at = jax.lax.top_k(score, k)
            return top, jnp.take_along_axis(number, at, axis=-1)

        shape = (*n_visible.shape, k)
        nothing = (jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_ROW, jnp.int32))
        return jnp.sort(jax.lax.fori_loop(0, n_tile, tile, nothing)[1], axis=-1)


def index_scores(query: jax.Array, weight: jax.Array, key: jax.Array) -> jax.Array:
    """Score keys: sum over heads of weight * relu(query . key).

    Args:
        query: [B, T, I, J]; weight: [B, T, I]; key: [B, n, J].

    Returns:
        [B, T, n] f32.
    """
    score = jax.nn.relu(products(query, key)) * weight[..., None]  # [B, T, I, n]
    return ordered_sum(score, 2)[:, :, 0]
