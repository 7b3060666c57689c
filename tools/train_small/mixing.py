"""Hyper-connections in training: the streams in the compute type, and a gradient of Sinkhorn's iterations that needs none of them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from ds4jax.model.hyper import HyperConnection, HyperHead, doubly_stochastic, weighted_sum
from ds4jax.model.quant import QTensor, matmul

# Added to a system that is singular where the iterations have hardly begun to converge; bounds the gradient as their number would.
_RIDGE = 0.02


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def combination(z: jax.Array, n_iter: int, eps: float) -> jax.Array:
    """Compute `hyper.sinkhorn` of z [M, H, H], differentiable wherever it is computed."""
    return doubly_stochastic(z, n_iter, eps)


def _forward(z: jax.Array, n_iter: int, eps: float) -> tuple[jax.Array, jax.Array]:
    comb = doubly_stochastic(z, n_iter, eps)
    return comb, comb


def _backward(n_iter: int, eps: float, comb: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    """Differentiate at the limit: comb = exp(z + a 1' + 1 b'), where a and b keep all rows and columns summing to 1.

    So dz = comb * (g - a 1' - 1 b') with a, b such that its rows and columns sum to 0: a = rowsum(comb * g) - comb b, and
    (I - comb' comb) b = colsum(comb * g) - comb' rowsum(comb * g).
    """
    h = comb.shape[-1]
    c = [[comb[:, j, k] for k in range(h)] for j in range(h)]  # elementwise code over M: reductions over so short axes are slow
    d = [[g[:, j, k] for k in range(h)] for j in range(h)]
    rows = [sum(c[j][k] * d[j][k] for k in range(h)) for j in range(h)]
    columns = [sum(c[j][k] * d[j][k] for j in range(h)) for k in range(h)]
    # b is free up to a constant, which cancels; 1/H everywhere picks the one that sums to about zero.
    system = [
        [(1.0 + _RIDGE) * (k == m) + 1.0 / h - sum(c[j][k] * c[j][m] for j in range(h)) for m in range(h)] for k in range(h)
    ]  # fmt: skip
    right = [columns[k] - sum(c[j][k] * rows[j] for j in range(h)) for k in range(h)]
    b = _solve(system, right)
    a = [rows[j] - sum(c[j][k] * b[k] for k in range(h)) for j in range(h)]
    dz = [[c[j][k] * (d[j][k] - a[j] - b[k]) for k in range(h)] for j in range(h)]
    return (jnp.stack([jnp.stack(row, axis=-1) for row in dz], axis=-2),)


combination.defvjp(_forward, _backward)


def _solve(system: list[list[jax.Array]], right: list[jax.Array]) -> list[jax.Array]:
    """Solve positive definite systems, elementwise over their entries [M]."""
    n = len(right)
    system, right = [list(row) for row in system], list(right)
    for i in range(n):
        for r in range(i + 1, n):
            factor = system[r][i] / system[i][i]
            system[r] = [system[r][k] - factor * system[i][k] for k in range(n)]
            right[r] = right[r] - factor * right[i]
    for i in reversed(range(n)):
        right[i] = (right[i] - sum(system[i][k] * right[k] for k in range(i + 1, n))) / system[i][i]
    return right


def _mix(x: jax.Array, fn: QTensor, eps: float) -> jax.Array:
    """Project normalised streams [M, H, D]: f32 [M, rows]. Scaled after the product, which spares a normalised copy."""
    flat = x.reshape(x.shape[0], -1)
    mean_square = jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True)
    return matmul(flat, fn, out_dtype=jnp.float32) * jax.lax.rsqrt(mean_square + eps)


def pre(hc: HyperConnection, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `HyperConnection.pre`: x [M, H, D] in any float type -> f32 input [M, D], post [M, H], comb [M, H, H]."""
    config, h = hc.config, hc.config.n_hc
    mix = _mix(x, hc.fn.get_value(), config.rms_eps)
    scale, base = hc.scale.get_value(), hc.base.get_value()[None, :]
    weight = jax.nn.sigmoid(mix[:, :h] * scale[0] + base[:, :h]) + config.hc_eps
    post = 2 * jax.nn.sigmoid(mix[:, h : 2 * h] * scale[1] + base[:, h : 2 * h])
    logits = (mix[:, 2 * h :] * scale[2] + base[:, 2 * h :]).reshape(-1, h, h)
    return weighted_sum(weight, x.astype(jnp.float32)), post, combination(logits, config.hc_sinkhorn_iters, config.hc_eps)


def head(hc: HyperHead, x: jax.Array) -> jax.Array:
    """Compute `HyperHead.__call__`: x [M, H, D] -> f32 [M, D]."""
    mix = _mix(x, hc.fn.get_value(), hc.config.rms_eps)
    weight = jax.nn.sigmoid(mix * hc.scale.get_value()[0] + hc.base.get_value()[None, :]) + hc.config.hc_eps
    return weighted_sum(weight, x.astype(jnp.float32))
