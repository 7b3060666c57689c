"""A plain transformer of the same size, for comparison: pre-norm, rotary attention over the whole conversation, SwiGLU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.model.norm import rms_norm
from tools.train_small.shapes import PlainShape
from tools.train_small.weights import Weights

_EPS, _BASE = 1e-6, 10000.0


def begin_plain(shape: PlainShape, seed: int) -> Weights:
    """Draw the first weights; the layers of a kind are stacked."""
    rng = np.random.default_rng(seed)
    n, d, f, v = shape.n_layer, shape.n_embd, shape.n_ff, shape.n_vocab

    def matrix(*sizes: int, gain: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(sizes) * gain * sizes[-1] ** -0.5, jnp.float32)

    return {
        "token_embd.weight": jnp.asarray(rng.standard_normal((v, d)) * 0.3, jnp.float32),
        "qkv": matrix(n, 3 * d, d),
        "attn_out": matrix(n, d, d, gain=(2 * n) ** -0.5),
        "gate_up": matrix(n, 2 * f, d),
        "down": matrix(n, d, f, gain=(2 * n) ** -0.5),
        # Norms stay near 1: Adam takes them, by their name.
        "hc_norms": jnp.ones((n, 2, d)),
        "hc_norm_out": jnp.ones((d,)),
        "output.weight": matrix(v, d, gain=0.5),
    }


def plain_logits(shape: PlainShape, weights: Weights, token: jax.Array, start: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Compute logits f32 [B, T, V] for tokens [B, T] int32; start as in `attend.Sequences`."""
    b, t = token.shape
    k = shape.n_embd // shape.n_head
    position = jnp.arange(t)
    seen = (position[None, :, None] >= position[None, None, :]) & (position[None, None, :] >= start[:, :, None])  # [B, T, T]
    omega = _BASE ** (-np.arange(0, k, 2, dtype=np.float32) / k)
    angle = position[:, None].astype(jnp.float32) * jnp.asarray(omega, jnp.float32)[None, :]
    cos, sin = (jnp.tile(f(angle), 2)[None, :, None] for f in (jnp.cos, jnp.sin))

    def turn(x: jax.Array) -> jax.Array:
        x0, x1 = jnp.split(x, 2, axis=-1)
        return x * cos + jnp.concatenate([-x1, x0], axis=-1) * sin

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("...k,nk->...n", x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32)

    def layer(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
        q, key, value = jnp.split(product(rms_norm(x, _EPS, w["hc_norms"][0]), w["qkv"]).reshape(b, t, 3 * shape.n_head, k), 3, axis=2)
        q, key = turn(rms_norm(q, _EPS)).astype(dtype), turn(rms_norm(key, _EPS)).astype(dtype)
        logit = jnp.einsum("btnk,bsnk->bnts", q, key, preferred_element_type=jnp.float32) * k**-0.5
        weight = jax.nn.softmax(jnp.where(seen[:, None], logit, -1e30)).astype(dtype)
        o = jnp.einsum("bnts,bsnk->btnk", weight, value.astype(dtype), preferred_element_type=jnp.float32)
        x = x + product(o.reshape(b, t, -1), w["attn_out"])
        gate, up = jnp.split(product(rms_norm(x, _EPS, w["hc_norms"][1]), w["gate_up"]), 2, axis=-1)
        return x + product(jax.nn.silu(gate) * up, w["down"]), None

    layers = {name: weights[name] for name in ("qkv", "attn_out", "gate_up", "down", "hc_norms")}
    x, _ = jax.lax.scan(jax.checkpoint(layer), weights["token_embd.weight"][token], layers)
    return product(rms_norm(x, _EPS, weights["hc_norm_out"]), weights["output.weight"])
