"""Decode packed weights: the plain-jnp reference of every kernel, bit-equal in float32 to what GGUF tools compute."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ds4jax.model.quant import kquants, repack
from ds4jax.model.quant.columns import from_columns
from ds4jax.model.quant.iq2 import iq2_xxs
from ds4jax.model.quant.layouts import layout_of
from ds4jax.model.quant.qtensor import QTensor


def dequantize(w: QTensor, dtype: DTypeLike = jnp.float32) -> Array:
    """Expand a packed weight to [..., N, K]: computed in float32, then cast to `dtype`."""
    if layout_of(w.kind).by_columns:
        return from_columns(w).astype(dtype)
    return _DECODERS[w.kind](w.fields).astype(dtype)


def _plain(fields: dict[str, Array]) -> Array:
    """F32, F16 and BF16 hold their values as they are."""
    return fields["w"].astype(jnp.float32)


def _q8_0(fields: dict[str, Array]) -> Array:
    """d f16 [..., K/32], q int8 [..., K]: w = d * q."""
    return _times(fields["d"].astype(jnp.float32), fields["q"].reshape(*fields["d"].shape, 32))


def _q4_0(fields: dict[str, Array]) -> Array:
    """d f16 [..., K/32], q uint8 [..., K/2]: w = d * (nibble - 8)."""
    return _times(fields["d"].astype(jnp.float32), _nibbles(fields["q"]).astype(jnp.int8) - 8)


def _mxfp4(fields: dict[str, Array]) -> Array:
    """exponent uint8 [..., K/32], q uint8 [..., K/2]: w = 2**(exponent - 127) * E2M1(nibble); beyond float32: infinity or NaN."""
    nibble = _nibbles(fields["q"]).astype(jnp.int32)
    m, e = nibble & 1, nibble >> 1 & 3
    # Assembled from bits: a product with 2**-127 would be flushed to zero on CPUs. E2M1 0.5 (e = 0, m = 1) is 2**-1, so it fits the rule
    # for the exponent, but its m is no mantissa.
    biased = jnp.minimum(fields["exponent"].astype(jnp.int32)[..., None] + e - 1, 255)
    significand = 1 << 23 | jnp.where(e > 0, m << 22, 0)
    normal = biased << 23 | significand & (1 << 23) - 1
    subnormal = significand >> jnp.maximum(1 - biased, 0)
    bits = jnp.where(biased > 0, normal, subnormal) | (nibble >> 3) << 31
    values = lax.bitcast_convert_type(jnp.where(nibble & 7 == 0, 0, bits), jnp.float32)
    return values.reshape(*fields["exponent"].shape[:-1], -1)


def _nibbles(q: Array) -> Array:
    """Unpack blocks of 16 bytes: low nibbles are elements 0-15, high nibbles 16-31. [..., n * 16] -> [..., n, 32]."""
    q = q.reshape(*q.shape[:-1], -1, 16)
    return jnp.concatenate([q & 15, q >> 4], -1)


def _times(scale: Array, q: Array) -> Array:
    """Multiply blocks by their scales: f32 [..., n] and integers [..., n, 32] -> f32 [..., n * 32]."""
    return (scale[..., None] * q.astype(jnp.float32)).reshape(*scale.shape[:-1], -1)


_DECODERS: dict[str, Callable[[dict[str, Array]], Array]] = {
    "F32": _plain,
    "F16": _plain,
    "BF16": _plain,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q2_K": kquants.q2_k,
    "Q3_K": kquants.q3_k,
    "Q4_K": kquants.q4_k,
    "Q5_K": kquants.q5_k,
    "Q6_K": kquants.q6_k,
    "IQ2_XXS": iq2_xxs,
    "MXFP4": _mxfp4,
    "IQ2_XXS:words": repack.iq2_xxs_words,
    "Q2_K:words": repack.q2_k_words,
    "Q4_K:words": repack.q4_k_words,
}
