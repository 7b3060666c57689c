"""Hyper-connections in training: the streams in the compute type, and Sinkhorn's iterations differentiated one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from ds4jax.model.hyper import HyperConnection, HyperHead, doubly_stochastic, weighted_sum
from ds4jax.model.quant import QTensor, matmul

# Larger logits are held down: the iterations do not bring them to a limit, and without a bound they drifted to hundreds.
LARGEST_LOGIT = 8.0

Matrix = tuple[tuple[jax.Array, ...], ...]  # rows of entries [M]: elementwise code fuses, reductions over so short axes do not


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def combination(z: jax.Array, n_iter: int, eps: float) -> jax.Array:
    """Compute `hyper.sinkhorn` of z [M, H, H], differentiable wherever it is computed."""
    return doubly_stochastic(z, n_iter, eps)


def _forward(z: jax.Array, n_iter: int, eps: float) -> tuple[jax.Array, jax.Array]:
    return doubly_stochastic(z, n_iter, eps), z


def _backward(n_iter: int, eps: float, z: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    # As at the limit it would be cheaper, and wrong by its own size for logits that the iterations do not bring there.
    pull_back: Callable[[jax.Array], tuple[jax.Array]] = jax.vjp(partial(_iterated, n_iter=n_iter, eps=eps), z)[1]
    return pull_back(g)


combination.defvjp(_forward, _backward)


def _iterated(z: jax.Array, *, n_iter: int, eps: float) -> jax.Array:
    """Compute `hyper.sinkhorn`, elementwise over M."""
    h = z.shape[-1]
    raised = jnp.exp(z - jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True)))
    entries: Matrix = tuple(tuple(raised[:, j, k] for k in range(h)) for j in range(h))
    soft = tuple(tuple(e / sum(row) + eps for e in row) for row in entries)

    def step(c: Matrix, _: None) -> tuple[Matrix, None]:
        return _columns(_transposed(_columns(_transposed(c), eps)), eps), None

    last, _ = jax.lax.scan(step, _columns(soft, eps), None, length=n_iter - 1)
    return jnp.stack([jnp.stack(row, axis=-1) for row in last], axis=-2)


def _columns(c: Matrix, eps: float) -> Matrix:
    total = [sum(column) + eps for column in zip(*c, strict=True)]
    return tuple(tuple(e / t for e, t in zip(row, total, strict=True)) for row in c)


def _transposed(c: Matrix) -> Matrix:
    return tuple(zip(*c, strict=True))


def excess(z: jax.Array) -> jax.Array:
    """Measure by how much logits [M, H, H] are larger than LARGEST_LOGIT: a loss, the mean over M."""
    return jnp.mean(jnp.sum(jnp.square(jax.nn.relu(jnp.abs(z) - LARGEST_LOGIT)), axis=(1, 2)))


def _mix(x: jax.Array, fn: QTensor, eps: float) -> jax.Array:
    """Project normalised streams [M, H, D]: f32 [M, rows]. Scaled after the product, which spares a normalised copy."""
    flat = x.reshape(x.shape[0], -1)
    mean_square = jnp.mean(jnp.square(flat.astype(jnp.float32)), axis=-1, keepdims=True)
    return matmul(flat, fn, out_dtype=jnp.float32) * jax.lax.rsqrt(mean_square + eps)


def pre(hc: HyperConnection, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute `HyperConnection.pre`: x [M, H, D] in any float type -> f32 input [M, D], post [M, H], comb [M, H, H]; and `excess`."""
    config, h = hc.config, hc.config.n_hc
    mix = _mix(x, hc.fn.get_value(), config.rms_eps)
    scale, base = hc.scale.get_value(), hc.base.get_value()[None, :]
    weight = jax.nn.sigmoid(mix[:, :h] * scale[0] + base[:, :h]) + config.hc_eps
    post = 2 * jax.nn.sigmoid(mix[:, h : 2 * h] * scale[1] + base[:, h : 2 * h])
    logits = (mix[:, 2 * h :] * scale[2] + base[:, 2 * h :]).reshape(-1, h, h)
    comb = combination(logits, config.hc_sinkhorn_iters, config.hc_eps)
    return weighted_sum(weight, x.astype(jnp.float32)), post, comb, excess(logits)


def head(hc: HyperHead, x: jax.Array) -> jax.Array:
    """Compute `HyperHead.__call__`: x [M, H, D] -> f32 [M, D]."""
    mix = _mix(x, hc.fn.get_value(), hc.config.rms_eps)
    weight = jax.nn.sigmoid(mix * hc.scale.get_value()[0] + hc.base.get_value()[None, :]) + hc.config.hc_eps
    return weighted_sum(weight, x.astype(jnp.float32))
