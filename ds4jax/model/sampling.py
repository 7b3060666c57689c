"""Draw each row's next token on the device. Everything a request can ask for is data of the step, never its shape.

The noise of a row comes from its own seed and the position it fills, so a text depends on its seed and its logits
alone: not on the batch, the bucket or the step at which it ran.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ds4jax.model.kernels import nucleus as kernels

UNUSABLE = -1  # the "token" of a row whose logits are NaN or all equal


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of each row, packed so that a step uploads two small arrays.

    number: f32 [3, B]: temperature, top_p, min_p.
    code: uint32 [4, B]: top_k, the seed's low and high words, and whether the drawn token's log probability is wanted.
    """

    number: jax.Array
    code: jax.Array

    @property
    def wants_scores(self) -> jax.Array:
        """bool [B]."""
        return self.code[3] != 0


def sample(model_logits: jax.Array, sampling: RowSampling, position: jax.Array, adjusted: jax.Array | None = None) -> jax.Array:
    """Draw one token a row.

    Filters apply in the order top-k, top-p (of what top-k left), min-p (relative to the best token); temperature
    shapes the probabilities before all of them. temperature <= 0 takes the best token, the lowest id among equals.

    Args:
        model_logits: [B, V] f32. position: int32 [B], the position that the drawn token will take.
        adjusted: [B, V] f32, what to draw from instead (`adjust.adjust`); -inf where a token may not be drawn.

    Returns:
        int32 [B]; UNUSABLE where a row's model_logits are NaN or all equal.
    """
    temperature, top_p, min_p = sampling.number
    # A maximum would not tell: on a CPU that of a long row may pass over NaN.
    are_numbers = jnp.all(jnp.isfinite(model_logits), axis=-1)
    usable = are_numbers & (jnp.max(model_logits, axis=-1) > jnp.min(model_logits, axis=-1))
    logits = model_logits if adjusted is None else adjusted
    greedy = _best(logits)
    peak = jnp.max(logits, axis=-1)

    on_gpu = jax.default_backend() == "gpu"  # which must not ask the host what to do next: no branch that depends on data

    def draw() -> jax.Array:
        warm = jnp.maximum(temperature, 1e-6)[:, None]
        weight = jnp.exp((logits - peak[:, None]) / warm)  # [B, V], best token 1
        top_k = jax.lax.bitcast_convert_type(sampling.code[0], jnp.int32)
        cut = (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0))
        if on_gpu:
            floor = kernels.nucleus_floor(weight, top_k, top_p, cut)
        else:
            floor = jax.lax.cond(jnp.any(cut), lambda: nucleus_floor(weight, top_k, top_p), lambda: jnp.zeros_like(top_p))
        # The best token always stays, whatever min_p says.
        kept = (weight >= jnp.maximum(floor, min_p)[:, None]) | (weight == 1.0)
        noise = _gumbel(sampling.code[1], sampling.code[2], position, logits.shape[-1])
        score = jnp.where(kept, (logits - peak[:, None]) / warm + noise, -jnp.inf)
        return jnp.where(temperature > 0.0, _best(score), greedy)

    token = draw() if on_gpu else jax.lax.cond(jnp.any(temperature > 0.0), draw, lambda: greedy)
    return jnp.where(usable, token, UNUSABLE)


def _best(score: jax.Array) -> jax.Array:
    """Find the best token of each row, the lowest id among equals: [B, V] -> int32 [B]. No valid id where a score is NaN."""
    if jax.default_backend() == "gpu":
        return jnp.argmax(score, axis=-1).astype(jnp.int32)
    # A CPU computes scores and finds maxima many at a time, but not together, and not while it keeps an index.
    score = jax.lax.optimization_barrier(score)
    n_vocab = score.shape[-1]
    peak = jnp.max(score, axis=-1, keepdims=True)
    return jnp.min(jnp.where(score == peak, jnp.arange(n_vocab, dtype=jnp.int32), n_vocab), axis=-1)


def nucleus_floor(weight: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Find the smallest weight that top-k and then top-p keep: f32 [B].

    By bisection over the bit patterns of non-negative floats, which order like the floats: exact in 31 halvings, and no
    sort of a vocabulary. Tokens of equal weight stay or go together.
    """
    v = weight.shape[-1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, v), v)
    at_k = _largest_floor(weight, lambda kept: jnp.sum((kept > 0.0).astype(jnp.int32), axis=-1) >= k)
    among_k = jnp.where(weight >= at_k[:, None], weight, 0.0)
    share = top_p * jnp.sum(among_k, axis=-1)
    at_p = _largest_floor(among_k, lambda kept: jnp.sum(kept, axis=-1) >= share)
    return jnp.where(top_p < 1.0, jnp.maximum(at_p, at_k), at_k)


def _largest_floor(weight: jax.Array, enough) -> jax.Array:  # noqa: ANN001
    """Find per row the largest floor f with enough(weight where >= f) true. f32 [B]; 0 where none is."""
    low = jnp.zeros(weight.shape[0], jnp.int32)  # floor 0 keeps everything
    high = jnp.full(weight.shape[0], jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        floor = jax.lax.bitcast_convert_type(middle, jnp.float32)
        fits = enough(jnp.where(weight >= floor[:, None], weight, 0.0))
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _gumbel(seed_low: jax.Array, seed_high: jax.Array, position: jax.Array, n_vocab: int) -> jax.Array:
    """Hash (seed, position, token) to standard Gumbel noise: f32 [B, V].

    The argmax of logit + Gumbel noise is a draw from the softmax. A counter and a hash need no state and no scan over
    the vocabulary, and fuse into the kernel that takes the argmax.
    """
    row = _mix(_mix(seed_low ^ _mix(seed_high + jnp.uint32(0x9E3779B9))) ^ position.astype(jnp.uint32))  # [B]
    token = jnp.arange(n_vocab, dtype=jnp.uint32) * jnp.uint32(0x85EBCA6B)
    bits = _mix(_mix(row[:, None] + token[None, :]) ^ row[:, None])
    # 24 bits in the middle of their interval: never 0, never 1, so both logarithms are finite.
    uniform = ((bits >> 8).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-24)
    return -jnp.log(-jnp.log(uniform))


def _mix(x: jax.Array) -> jax.Array:
    """Scramble uint32 so that every input bit flips each output bit about half the time (a two-round multiply-xorshift hash)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
