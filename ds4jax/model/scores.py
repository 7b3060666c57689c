"""How likely the model itself thought a drawn token and its best alternatives, before anything was done to the logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ds4jax.model.kernels.top import top

TOP = 20  # alternatives of a token; how many of them a client sees is cut on the host


def score(logits: jax.Array, token: jax.Array, wanted: jax.Array) -> jax.Array:
    """Score the drawn token of each row that wants it, and list the best tokens.

    Args:
        logits: [B, V] f32, as the model gave them. token: int32 [B]. wanted: bool [B].

    Returns:
        int32 [B, 1 + 2 TOP]: the token's log probability, the ids of the best tokens (likeliest first, the lower id first among equals;
        -1 where the vocabulary has no more), and their log probabilities; floats by their bits, so that one copy brings all to the host.
        Rows that do not want it hold anything.
    """
    k = min(TOP, logits.shape[-1])

    def scored() -> jax.Array:
        best, ids = top(logits, wanted, k) if on_gpu else jax.lax.top_k(logits, k)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        total = peak + jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))  # [B, 1]
        drawn = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=1)
        number = jax.lax.bitcast_convert_type(jnp.concatenate([drawn, best], axis=1) - total, jnp.int32)
        absent = jnp.full((len(token), TOP - k), -1, jnp.int32)
        return jnp.concatenate([number[:, :1], ids, absent, number[:, 1:], absent], axis=1)

    on_gpu = jax.default_backend() == "gpu"  # which must not ask the host whether anybody wants it
    if on_gpu:
        return scored()
    return jax.lax.cond(jnp.any(wanted), scored, lambda: jnp.zeros((len(token), 1 + 2 * TOP), jnp.int32))
