"""Attention over one shared row a token: a sliding window of raw rows, compressed rows, and a sink.

Keys and values are the same rows. The softmax runs over tiles (a running maximum, sum and weighted sum), so that a
layer reads the window, then the compressed rows that are live, whatever the capacity of a slot.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.config import ModelConfig
from ds4jax.model.cache import KVCache
from ds4jax.model.compressor import Compressor
from ds4jax.model.indexer import NO_ROW, Indexer
from ds4jax.model.kernels import flash, index, query
from ds4jax.model.norm import rms_norm
from ds4jax.model.quant import grouped_matmul, matmul, project
from ds4jax.model.rope import frequencies, rotate
from ds4jax.model.softmax import RunningSoftmax
from ds4jax.model.weights import Take

TILE = 256  # compressed rows attended at a time
QUERY_TILE = 128  # tokens of a chunk that attend together
MOST_SCORES = 1 << 29  # of a chunk's tokens for compressed rows, that kernels keep: 2 GiB, which they can address
CHOICE_TILE = 32  # the same on layers where every token gathers rows of its own


@dataclass(frozen=True)
class LayerIndex:
    """Where a layer's state stands in the cache: its number among all layers, and among those of its ratio."""

    raw: jax.Array
    comp: jax.Array


@dataclass(frozen=True)
class Span:
    """The tokens of a step: row b continues slot[b] at position start[b] with n[b] real tokens of T. All int32 [B].

    A slot outside the cache marks a row that nobody uses: it reads something, writes nothing.
    """

    slot: jax.Array
    start: jax.Array
    n: jax.Array

    def live(self, n_token: int, n_slot: int) -> jax.Array:
        """Mark the real tokens among n_token a row: bool [B * n_token]."""
        real = jnp.arange(n_token)[None, :] < self.n[:, None]
        return (real & (self.slot < n_slot)[:, None]).reshape(-1)


class Attention(nnx.Module):
    """One layer's attention. ratio: 0, 4 or 128."""

    def __init__(self, config: ModelConfig, take: Take, prefix: str, ratio: int, kv_quant: str) -> None:
        self.config, self.ratio, self.kernels = config, ratio, take.kernels
        d, n, k, q = config.n_embd, config.n_head, config.head_dim, config.q_lora_rank
        self.q_a_norm = nnx.Param(take.vector(f"{prefix}attn_q_a_norm.weight", q))
        self.q_b = nnx.Param(take.matrix(f"{prefix}attn_q_b.weight", n * k, q))
        self.kv_a_norm = nnx.Param(take.vector(f"{prefix}attn_kv_a_norm.weight", k))
        self.sinks = nnx.Param(take.vector(f"{prefix}attn_sinks.weight", n))
        g, r = config.n_out_group, config.o_lora_rank
        self.output_a = nnx.Param(take.matrix(f"{prefix}attn_output_a.weight", g * r, n // g * k))
        self.output_b = nnx.Param(take.matrix(f"{prefix}attn_output_b.weight", d, g * r))
        inputs = {f"{prefix}attn_q_a.weight": q, f"{prefix}attn_kv.weight": k}  # all that the block's input meets
        if ratio:
            self.compressor = Compressor(config, take, f"{prefix}attn_compressor", ratio, k, with_hadamard=False)
            inputs |= self.compressor.inputs(f"{prefix}attn_compressor")
        if ratio == 4:
            self.indexer = Indexer(config, take, f"{prefix}indexer", rounded=kv_quant == "ds4")
            inputs |= self.indexer.inputs(f"{prefix}indexer")
        self.inputs = nnx.Param(take.joined(inputs, d))

    def __call__(self, x: jax.Array, cache: KVCache, at: LayerIndex, span: Span, dtype: jnp.dtype) -> tuple[jax.Array, KVCache]:
        """Attend with a step's tokens and extend the cache by them.

        Args:
            x: [B, T, D] f32, the block's normalised input. T = 1 is a decode step.

        Returns:
            [B, T, D] f32 and the cache.
        """
        b, t, d = x.shape
        position = span.start[:, None] + jnp.arange(t)[None, :]  # [B, T]
        omega = frequencies(self.config, compressed=self.ratio != 0)
        flat, flat_position = x.reshape(b * t, d), position.reshape(-1)

        inputs = self.inputs.get_value()
        q_a, kv, *rest = inputs.split(project(flat.astype(dtype), inputs, out_dtype=jnp.float32))
        lora = rms_norm(q_a, self.config.rms_eps, self.q_a_norm.get_value())
        q = self._linear(lora, self.q_b, dtype).reshape(b, t, self.config.n_head, self.config.head_dim)
        kv = rms_norm(kv, self.config.rms_eps, self.kv_a_norm.get_value())
        kv = rotate(kv, flat_position, omega).reshape(b, t, -1)

        # Compress first, attend after: a token sees the row that it completes itself.
        if self.ratio:
            cache = self._compress(rest, flat_position, cache, at, span, t)
        projected = (self._linear(lora, self.indexer.attn_q_b, dtype), rest[-1]) if self.ratio == 4 else None  # for the indexer
        if t > 1 and self.kernels and takes_chunk(cache, self.config, b * t):
            o, cache = self._attend_flash(q, kv, projected, cache, at, span)
        else:
            query_index = None
            if projected is not None:
                iq, weight = self.indexer.queries(*projected, flat_position)
                query_index = iq.reshape(b, t, *iq.shape[1:]), weight.reshape(b, t, -1)
            q = rotate(rms_norm(q, self.config.rms_eps), position[:, :, None], omega)
            attend = self._attend_step if t == 1 else self._attend_chunk
            o, cache = attend(q, kv, query_index, cache, at, span)
        o = rotate(o, position[:, :, None], omega, inverse=True)

        g = self.config.n_out_group
        low = grouped_matmul(o.reshape(b * t, g, -1).astype(dtype), self.output_a.get_value(), out_dtype=jnp.float32)
        return self._linear(low.reshape(b * t, -1), self.output_b, dtype).reshape(b, t, d), cache

    @staticmethod
    def _linear(x: jax.Array, w: nnx.Param, dtype: jnp.dtype) -> jax.Array:
        return matmul(x.astype(dtype), w.get_value(), out_dtype=jnp.float32)

    # ------------------------------------------------------------------ compressed rows
    def _compress(self, inputs: list[jax.Array], position: jax.Array, cache: KVCache, at: LayerIndex, span: Span, t: int) -> KVCache:
        """Feed the projected inputs, two [B*T, columns] a compressor, to the layer's compressors."""
        jobs = [(self.compressor, "win4" if self.ratio == 4 else "win128", "comp4" if self.ratio == 4 else "comp128")]
        if self.ratio == 4:
            jobs.append((self.indexer.compressor, "win_index", "index"))
        for i, (compressor, window_name, rows_name) in enumerate(jobs):
            window, rows = getattr(cache, window_name), getattr(cache, rows_name)
            u, z = inputs[2 * i], compressor.gates(inputs[2 * i + 1], position)
            if t == 1:
                window, rows = compressor.step(window, rows, at.comp, span.slot, span.start, u, z)
            else:
                u, z = (a.reshape(-1, t, a.shape[-1]) for a in (u, z))
                window, rows = compressor.chunk(window, rows, at.comp, span.slot, span.start, span.n, u, z)
            changed: dict[str, Any] = {window_name: window, rows_name: rows}
            cache = dataclasses.replace(cache, **changed)
        return cache

    def _absorb_compressed(
        self,
        acc: RunningSoftmax,
        q: jax.Array,
        query_index: tuple[jax.Array, jax.Array] | None,
        cache: KVCache,
        at: LayerIndex,
        slot: jax.Array,
        position: jax.Array,
    ) -> RunningSoftmax:
        """Add the compressed rows that each query may see. q: [B, T, N, K]; position: int32 [B, T]."""
        if not self.ratio:
            return acc
        rows = cache.comp4 if self.ratio == 4 else cache.comp128
        n_visible = jnp.minimum((position + 1) // self.ratio, rows.n_row)
        if query_index is not None and rows.n_row > self.config.index_top_k:
            chosen = self.indexer.choose(cache.index, at.comp, slot, *query_index, n_visible)  # [B, T, k]
            picked = rows.read(at.comp, slot[:, None, None], chosen)  # [B, T, k, K]
            b, t = position.shape
            each = jax.tree.map(lambda a: a.reshape(b * t, 1, *a.shape[2:]), acc)
            seen = (chosen != NO_ROW).reshape(b * t, 1, -1)
            each = each.absorb(q.reshape(b * t, 1, *q.shape[2:]), picked.reshape(b * t, *picked.shape[2:]), seen)
            return jax.tree.map(lambda a: a.reshape(b, t, *a.shape[2:]), each)

        n_tile_rows = min(TILE, rows.n_row)
        n_tile = (jnp.max(n_visible) + n_tile_rows - 1) // n_tile_rows

        def tile(i: jax.Array, acc: RunningSoftmax) -> RunningSoftmax:
            number = i * n_tile_rows + jnp.arange(n_tile_rows)
            seen = number[None, None, :] < n_visible[:, :, None]
            return acc.absorb(q, rows.read(at.comp, slot[:, None], number[None, :]), seen)

        return jax.lax.fori_loop(0, n_tile, tile, acc)

    # ------------------------------------------------------------------ the two shapes of a step
    def _attend_step(
        self, q: jax.Array, kv: jax.Array, query_index: tuple[jax.Array, jax.Array] | None, cache: KVCache, at: LayerIndex, span: Span
    ) -> tuple[jax.Array, KVCache]:
        """Attend with one token a row. q: [B, 1, N, K]; kv: [B, 1, K]."""
        w = self.config.n_window
        raw = cache.raw.write(at.raw, span.slot, span.start % w, kv[:, 0])
        cache = dataclasses.replace(cache, raw=raw)
        ring = jnp.arange(w)[None, :]
        window = raw.read(at.raw, span.slot[:, None], ring)  # [B, W, K]
        # Ring row j was written at the last position congruent to j; negative means never in this conversation.
        written = span.start[:, None] - (span.start[:, None] - ring) % w
        acc = RunningSoftmax.start(self.sinks.get_value(), q).absorb(q, window, (written >= 0)[:, None, :])
        acc = self._absorb_compressed(acc, q, query_index, cache, at, span.slot, span.start[:, None])
        return acc.result(), cache

    def _attend_chunk(
        self, q: jax.Array, kv: jax.Array, query_index: tuple[jax.Array, jax.Array] | None, cache: KVCache, at: LayerIndex, span: Span
    ) -> tuple[jax.Array, KVCache]:
        """Attend with T tokens a row, in tiles of queries. q: [B, T, N, K]; kv: [B, T, K]."""
        b, t = kv.shape[:2]
        w = self.config.n_window
        keys = self._chunk_keys(kv, cache, at, span)
        step = min(CHOICE_TILE if query_index is not None else QUERY_TILE, t)
        padded = -(-t // step) * step
        q, keys = (jnp.pad(a, ((0, 0), (0, padded - t)) + ((0, 0),) * (a.ndim - 2)) for a in (q, keys))
        if query_index is not None:
            query_index = tuple(jnp.pad(a, ((0, 0), (0, padded - t)) + ((0, 0),) * (a.ndim - 2)) for a in query_index)  # type: ignore[assignment]

        def tile(first: jax.Array) -> jax.Array:
            q_tile = jax.lax.dynamic_slice_in_dim(q, first, step, axis=1)
            rows = jax.lax.dynamic_slice_in_dim(keys, first, w + step, axis=1)
            offset = first + jnp.arange(step)  # of the queries in the chunk
            behind = offset[:, None] + w - (first + jnp.arange(w + step))[None, :]  # tokens from key back to query
            in_window = (behind >= 0) & (behind < w)
            exists = span.start[:, None] - w + (first + jnp.arange(w + step))[None, :] >= 0  # [B, W + step]
            acc = RunningSoftmax.start(self.sinks.get_value(), q_tile).absorb(q_tile, rows, in_window[None] & exists[:, None, :])
            # Queries past the chunk's real tokens look at nothing compressed, so they cost no extra tiles.
            position = jnp.where(offset[None, :] < span.n[:, None], span.start[:, None] + offset[None, :], -1)
            index = None
            if query_index is not None:
                index = tuple(jax.lax.dynamic_slice_in_dim(a, first, step, axis=1) for a in query_index)
            return self._absorb_compressed(acc, q_tile, index, cache, at, span.slot, position).result()  # type: ignore[arg-type]

        tiles = jax.lax.map(tile, jnp.arange(padded // step) * step)  # [padded / step, B, step, N, K]
        o = jnp.moveaxis(tiles, 0, 1).reshape(b, padded, *tiles.shape[3:])[:, :t]

        return o, self._keep_window(kv, cache, at, span)

    def _attend_flash(
        self, q: jax.Array, kv: jax.Array, projected: tuple[jax.Array, jax.Array] | None, cache: KVCache, at: LayerIndex, span: Span
    ) -> tuple[jax.Array, KVCache]:
        """Attend as `_attend_chunk`, by kernels. q: not yet normalised and rotated. projected: what `Indexer.queries` takes."""
        c, (b, t) = self.config, kv.shape[:2]
        omega = frequencies(c, compressed=self.ratio != 0)
        offset = jnp.arange(t)[None, :]
        position = span.start[:, None] + offset
        keys, n_comp, chosen = [self._chunk_keys(kv, cache, at, span)], jnp.zeros_like(position), None
        if self.ratio:
            rows = cache.comp4 if self.ratio == 4 else cache.comp128
            keys.append(rows.read(at.comp, span.slot[:, None], jnp.arange(rows.n_row)[None, :]))
            n_comp = jnp.minimum((position + 1) // self.ratio, rows.n_row)
            if projected is not None and rows.n_row > c.index_top_k:
                slot = jnp.where(offset < span.n[:, None], span.slot[:, None], cache.n_slot)
                flat = slot.reshape(-1), position.reshape(-1)
                number, count = index.choose_rows(*projected, cache.index, jnp.asarray(at.comp), *flat, top_k=c.index_top_k, omega=omega)
                chosen, n_comp = number.reshape(b, t, -1), count.reshape(b, t)
        exact = jnp.float16 if cache.raw.format == "fp8" else jnp.bfloat16  # holds what the cache holds
        flat = q.reshape(b * t, *q.shape[2:]), position.reshape(-1)
        q = query.finish_queries(*flat, omega=omega, eps=c.rms_eps, dtype=exact).reshape(q.shape)
        o = flash.flash(
            q, jnp.concatenate(keys, axis=1).astype(exact), self.sinks.get_value()[None], jnp.zeros(1, jnp.int32), span.start,
            span.n, n_comp, chosen, window=c.n_window,
        )  # fmt: skip
        return o.astype(jnp.float32), self._keep_window(kv, cache, at, span)

    def _chunk_keys(self, kv: jax.Array, cache: KVCache, at: LayerIndex, span: Span) -> jax.Array:
        """Return the rows of the window before a chunk, then its own: [B, W + T, K], row i of position start - W + i."""
        w = self.config.n_window
        before = span.start[:, None] - w + jnp.arange(w)[None, :]
        old = cache.raw.read(at.raw, span.slot[:, None], before % w)
        return jnp.concatenate([old, cache.raw.round(kv)], axis=1)

    def _keep_window(self, kv: jax.Array, cache: KVCache, at: LayerIndex, span: Span) -> KVCache:
        """Keep the last W real tokens of a chunk in the ring."""
        w, offset = self.config.n_window, jnp.arange(kv.shape[1])[None, :]
        stays = (offset < span.n[:, None]) & (offset >= span.n[:, None] - w)
        row = jnp.where(stays, (span.start[:, None] + offset) % w, w)
        return dataclasses.replace(cache, raw=cache.raw.write(at.raw, span.slot[:, None], row, kv))


def takes_chunk(cache: KVCache, config: ModelConfig, n_token: int) -> bool:
    """Whether kernels attend with a chunk of so many tokens, on this cache."""
    if cache.index.n_row > config.index_top_k and not (index.fits(cache.index) and n_token * cache.index.n_row < MOST_SCORES):
        return False
    return flash.fits(config.n_head, config.head_dim, config.n_window)
