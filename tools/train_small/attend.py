"""Attention over whole sequences at once, for training: the serving layer's weights and formulas, with masks in place of a cache."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ds4jax.model.attention import Attention
from ds4jax.model.cache import decode, encode
from ds4jax.model.compressor import Compressor
from ds4jax.model.indexer import index_scores
from ds4jax.model.norm import rms_norm
from ds4jax.model.quant import dequantize
from ds4jax.model.rope import frequencies, rotate
from tools.train_small.products import contract, product

INDEX_EVERY = 8  # tokens between those whose attention teaches the indexer


@dataclass(frozen=True)
class Sequences:
    """Where conversations stand in windows of T tokens. start: int32 [B, T], where each token's conversation begins.

    rounded: whether attention rows are rounded as a ds4 cache does (the gradient passes as if they were not).
    reach: int32 [B], how many of the last tokens are seen as they are, if fewer than the attention's window.
    """

    start: jax.Array
    rounded: bool
    reach: jax.Array | None = None


def attend(attn: Attention, x: jax.Array, at: Sequences, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Compute one layer's attention for x [B, T, D] f32, from an empty cache.

    Returns:
        [B, T, D] f32, and how far the indexer's choice is from what the heads look at (a cross entropy; 0 without an indexer).
    """
    config, (b, t, _) = attn.config, x.shape
    position = jnp.arange(t)[None, :]
    omega = frequencies(config, compressed=attn.ratio != 0)
    joined = attn.inputs.get_value()
    weight = dequantize(joined.groups[0], dtype)
    n_main = joined.places[3 if attn.ratio else 1][1]
    inputs = product(x, weight[:n_main], dtype)
    q_a, kv, *rest = (inputs[..., first:end] for first, end in joined.places[: 4 if attn.ratio else 2])

    lora = rms_norm(q_a, config.rms_eps, attn.q_a_norm.get_value())
    q = product(lora, attn.q_b.get_value(), dtype).reshape(b, t, config.n_head, config.head_dim)
    q = rotate(rms_norm(q, config.rms_eps), position[:, :, None], omega)
    kv = rotate(rms_norm(kv, config.rms_eps, attn.kv_a_norm.get_value()), position, omega)
    kv = _as_stored(kv, config.n_rot, at.rounded)
    rows = None
    if attn.ratio:
        rows = _as_stored(_pooled_rows(attn.compressor, *rest, at), config.n_rot, at.rounded)
    o, seen = _attention(attn, q, kv, rows, at, dtype)
    o = rotate(o, position[:, :, None], omega, inverse=True)

    groups = dequantize(attn.output_a.get_value(), dtype).reshape(config.n_out_group, config.o_lora_rank, -1)
    low = contract("btgk,grk->btgr", o.reshape(b, t, config.n_out_group, -1), groups, dtype).reshape(b, t, -1)
    out = product(low, attn.output_b.get_value(), dtype)
    index_loss = jnp.float32(0)
    if attn.ratio == 4:
        # The indexer learns from the attention and teaches it nothing: no gradient leaves it.
        inputs = product(jax.lax.stop_gradient(x), weight[n_main:], dtype)
        parts = [inputs[..., first - n_main : end - n_main] for first, end in joined.places[4:]]
        index_loss = _index_loss(attn, jax.lax.stop_gradient(lora), parts, jax.lax.stop_gradient(seen), at, dtype)
    return out, index_loss


def _as_stored(rows: jax.Array, n_rot: int, rounded: bool) -> jax.Array:
    """Round rows as a cache in ds4's format does, straight through."""
    if not rounded:
        return rows
    return rows + jax.lax.stop_gradient(decode(encode(rows, "fp8", n_rot), "fp8", n_rot) - rows)


def _pooled_rows(compressor: Compressor, u: jax.Array, gate: jax.Array, at: Sequences) -> jax.Array:
    """Pool projected inputs [B, T, columns] to rows [B, T / ratio, width]."""
    b, t, columns = u.shape
    ratio = compressor.ratio
    z = compressor.gates(gate, jnp.arange(t))
    u, z = (a.reshape(b, t // ratio, ratio, columns) for a in (u, z))
    if compressor.lead:
        # A conversation's first window has none before it.
        begins = jnp.arange(t // ratio)[None, :] * ratio == at.start[:, ::ratio]
        before_u, before_z = (jnp.pad(a[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0))) for a in (u, z))
        before_z = jnp.where(begins[:, :, None, None], -jnp.inf, before_z)
        u, z = jnp.concatenate([before_u, u], axis=2), jnp.concatenate([before_z, z], axis=2)
    return compressor.finish(compressor.pool(u, z), jnp.arange(t // ratio)[None, :])


def _visible(ratio: int, n_row: int, position: jax.Array, start: jax.Array) -> jax.Array:
    """Mark the compressed rows that tokens may see: closed by then, and of their conversation. [B, T] -> bool [B, T, n_row]."""
    first = jnp.arange(n_row) * ratio
    return (first + ratio <= position[..., None] + 1) & (first >= start[..., None])


def _attention(
    attn: Attention, q: jax.Array, kv: jax.Array, rows: jax.Array | None, at: Sequences, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Attend to the window, the compressed rows and the sink: [B, T, N, K] f32.

    Also returns the weight of each compressed row for every INDEX_EVERY-th token, summed over heads: [B, T / INDEX_EVERY, C] f32.
    """
    b, t, n, k = q.shape
    w = attn.config.n_window
    tiles = t // w
    q = (q * k**-0.5).astype(dtype).reshape(b, tiles, w, n, k)
    own = kv.astype(dtype).reshape(b, tiles, w, k)
    before = jnp.pad(own[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    near = jnp.concatenate([before, own], axis=2)  # [B, tiles, 2W, K]
    position = jnp.arange(t).reshape(1, tiles, w)
    start = at.start.reshape(b, tiles, w)
    key = position[:, :, :1] - w + jnp.arange(2 * w)  # [1, tiles, 2W], positions of near
    behind = position[..., None] - key[:, :, None, :]
    reach = w if at.reach is None else at.reach[:, None, None, None]
    seen = (behind >= 0) & (behind < reach) & (key[:, :, None, :] >= start[..., None])  # [B, tiles, W, 2W]
    logit = contract("bgtnk,bgrk->bgntr", q, near, dtype)
    logits = [jnp.where(seen[:, :, None], logit.astype(jnp.float32), -jnp.inf)]
    if rows is not None:
        seen = _visible(attn.ratio, rows.shape[1], position, start)
        logit = contract("bgtnk,bck->bgntc", q, rows, dtype)
        logits.append(jnp.where(seen[:, :, None], logit.astype(jnp.float32), -jnp.inf))
    sink = attn.sinks.get_value()[None, None, :, None]
    peak = sink
    for logit in logits:
        peak = jnp.maximum(peak, jnp.max(logit, axis=-1))
    peak = jax.lax.stop_gradient(peak)  # [B, tiles, N, W]
    weights = [jnp.exp(logit - peak[..., None]) for logit in logits]
    total = jnp.exp(sink - peak)
    for weight in weights:
        total = total + jnp.sum(weight, axis=-1)
    value = contract("bgntr,bgrk->bgtnk", weights[0], near, dtype).astype(jnp.float32)
    looked = jnp.zeros((b, t // INDEX_EVERY, 0), jnp.float32)
    if rows is not None:
        value += contract("bgntc,bck->bgtnk", weights[1], rows, dtype)
        some = weights[1][:, :, :, INDEX_EVERY - 1 :: INDEX_EVERY] / total[:, :, :, INDEX_EVERY - 1 :: INDEX_EVERY, None]
        looked = jnp.sum(some, axis=2).reshape(b, t // INDEX_EVERY, -1)
    return (value / jnp.swapaxes(total, 2, 3)[..., None]).reshape(b, t, n, k), looked


def _index_loss(attn: Attention, lora: jax.Array, parts: list[jax.Array], looked: jax.Array, at: Sequences, dtype: jnp.dtype) -> jax.Array:
    """Compare the indexer's scores with what the heads looked at: a mean cross entropy over tokens that can choose.

    parts: the projected inputs of the indexer's compressor, u and gate [B, T, 2J], and its heads' weights [B, T, I].

    The serving layer rotates queries and keys by a Hadamard matrix and rounds them; the rotation changes no score, so neither is here.
    """
    indexer, config = attn.indexer, attn.config
    key = _pooled_rows(indexer.compressor, parts[0], parts[1], at)  # [B, C, J]
    b, t = lora.shape[:2]
    some = slice(INDEX_EVERY - 1, None, INDEX_EVERY)
    position = jnp.arange(t)[None, some]
    q = product(lora[:, some], indexer.attn_q_b.get_value(), dtype)
    q = rotate(q.reshape(b, -1, config.n_index_head, config.index_dim), position[:, :, None], frequencies(config, compressed=True))
    weight = parts[2][:, some] * (config.n_index_head * config.index_dim) ** -0.5
    seen = _visible(4, key.shape[1], position, at.start[:, some])
    score = jnp.where(seen, index_scores(q, weight, key), -1e30)
    mass = jnp.sum(looked, axis=-1, keepdims=True)
    target = looked / jnp.maximum(mass, 1e-6)
    cross = -jnp.sum(target * jax.nn.log_softmax(score), axis=-1)
    can_choose = jnp.sum(seen, axis=-1) > 1
    return jnp.sum(jnp.where(can_choose, cross, 0.0)) / jnp.maximum(jnp.sum(can_choose), 1)
