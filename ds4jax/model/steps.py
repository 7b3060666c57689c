"""The two functions that all else exists to call: prefill_chunk and decode_step. Pure; the cache goes in and comes out.

A row is a slot that takes part in the step. A row whose slot is `n_slot` (one past the last) is padding: it computes
something and writes nothing, so every other slot is bit-identical afterwards.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ds4jax.model.attention import Span
from ds4jax.model.cache import KVCache
from ds4jax.model.transformer import Transformer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch:
    """One token for each row. token: int32 [B], -1 for the token that the last step sampled for the slot. slot: int32 [B]."""

    token: jax.Array
    slot: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """A piece of prompt for each row. token: int32 [B, T], padded at the end; slot: int32 [B]; n: int32 [B], real tokens (1..T)."""

    token: jax.Array
    slot: jax.Array
    n: jax.Array


def decode_step(model: Transformer, cache: KVCache, batch: DecodeBatch, dtype: jnp.dtype) -> tuple[jax.Array, KVCache]:
    """Advance each row by one token.

    Returns:
        logits [B, V] f32 after that token, and the cache with positions advanced.
    """
    fed = jnp.where(batch.token < 0, cache.next_token.at[batch.slot].get(mode="clip"), batch.token)
    fed = jnp.clip(fed, 0, model.config.n_vocab - 1)  # the stand-in of an unusable row must not index outside the tables
    one = PrefillBatch(fed[:, None], batch.slot, jnp.ones_like(batch.slot))
    x, cache = _advance(model, cache, one, dtype)
    return model.logits(x[:, 0], dtype), cache


def prefill_chunk(model: Transformer, cache: KVCache, batch: PrefillBatch, dtype: jnp.dtype) -> tuple[jax.Array, KVCache]:
    """Advance each row by its n tokens.

    Returns:
        logits [B, V] f32 after each row's last real token, and the cache.
    """
    x, cache = _advance(model, cache, batch, dtype)
    last = jnp.take_along_axis(x, jnp.maximum(batch.n - 1, 0)[:, None, None, None], axis=1)[:, 0]  # [B, H, D]
    return model.logits(last, dtype), cache


def prefill_all_logits(model: Transformer, cache: KVCache, batch: PrefillBatch, dtype: jnp.dtype) -> tuple[jax.Array, KVCache]:
    """As prefill_chunk, with the logits after every token: [B, T, V] f32."""
    x, cache = _advance(model, cache, batch, dtype)
    b, t = batch.token.shape
    return model.logits(x.reshape(b * t, *x.shape[2:]), dtype).reshape(b, t, -1), cache


def _advance(model: Transformer, cache: KVCache, batch: PrefillBatch, dtype: jnp.dtype) -> tuple[jax.Array, KVCache]:
    """Run the model from each slot's position and move the positions on."""
    start = cache.position.at[batch.slot].get(mode="clip")
    # A padding row stands at position 0: what it pretends to see must not lengthen anybody's loop.
    start = jnp.where(batch.slot < cache.n_slot, start, 0)
    x, cache = model(batch.token, cache, Span(batch.slot, start, batch.n), dtype)
    return x, dataclasses.replace(cache, position=cache.position.at[batch.slot].set(start + batch.n, mode="drop"))
