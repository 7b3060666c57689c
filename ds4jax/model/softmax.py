"""Softmax over rows that arrive in tiles: a running maximum, denominator and weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ds4jax.model.quant import dot
from ds4jax.model.sums import largest, ordered_sum, rounded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningSoftmax:
    """State of an attention in progress for queries [B, T, N].

    peak: largest logit so far; total: sum of exp(logit - peak); value: the same sum weighting the rows, [..., K]. All f32.
    A tile without visible rows changes no bit of it, so a query's result does not depend on how far others look.
    """

    peak: jax.Array  # [B, T, N]
    total: jax.Array  # [B, T, N]
    value: jax.Array  # [B, T, N, K]

    @classmethod
    def start(cls, sinks: jax.Array, q: jax.Array) -> RunningSoftmax:
        """Begin with the sink: a logit [N] that takes weight and adds nothing. q: [B, T, N, K]."""
        peak = jnp.broadcast_to(sinks[None, None, :], q.shape[:-1])
        return cls(peak, jnp.ones(q.shape[:-1], jnp.float32), jnp.zeros(q.shape, jnp.float32))

    def absorb(self, q: jax.Array, rows: jax.Array, seen: jax.Array) -> RunningSoftmax:
        """Attend to rows [B, n, K] (keys and values alike) with queries [B, T, N, K] where seen [B, T, n]."""
        logit = products(q, rows) * (1.0 / q.shape[-1] ** 0.5)
        logit = jnp.where(seen[:, :, None, :], logit, -jnp.inf)
        peak = jnp.maximum(self.peak, largest(logit, -1)[..., 0])
        weight = jnp.exp(logit - peak[..., None])
        decay = jnp.exp(self.peak - peak)
        total = rounded(self.total * decay) + ordered_sum(weight, -1)[..., 0]
        value = rounded(self.value * decay[..., None]) + _einsum("btnr,brk->btnk", weight, rows)
        return RunningSoftmax(peak, total, value)

    def result(self) -> jax.Array:
        """Return the attention output [B, T, N, K]."""
        return self.value / self.total[..., None]


def products(q: jax.Array, rows: jax.Array) -> jax.Array:
    """Multiply queries [B, T, N, K] by the rows [B, n, K] of their batch row: [B, T, N, n] f32."""
    if q.shape[1] == 1 and jax.default_backend() == "cpu":
        # Few queries meet many rows. As second operand the rows would be turned around first, which takes longer than the product; so
        # they stand first, and the result is turned around: behind a barrier, or the compiler puts the operands back as they were.
        by_row = dot(rows[0], q[0, 0])[None] if len(q) == 1 else _einsum("brk,bnk->brn", rows, q[:, 0])
        return jnp.swapaxes(jax.lax.optimization_barrier(by_row), 1, 2)[:, None]
    if len(rows) == 1:  # XLA turns a batch of one over and over until it is another product, with sums in another order
        return dot(q.reshape(-1, q.shape[-1]), rows[0]).reshape(*q.shape[:-1], rows.shape[1])
    return _einsum("btnk,brk->btnr", q, rows)


def _einsum(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(axes, a, b, precision=jax.lax.Precision.HIGHEST)
