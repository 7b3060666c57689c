"""Put experts' weights into the order that kernels read: whole words that lie side by side, nothing to look up, nothing lost.

A kernel holds tiles [rows, groups] of 32-bit words. So the words of a row lie in planes, word by word: the same word of all groups is
one contiguous run, and no tile has to be reshaped.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ds4jax.model.quant.iq2 import SELECTORS
from ds4jax.model.quant.qtensor import QTensor

# GGUF type -> the prepared layout that holds the same weights (in `layouts`).
PREPARED = {"IQ2_XXS": "IQ2_XXS:words", "Q2_K": "Q2_K:words"}

Fields = dict[str, Array]


def prepare(w: QTensor) -> QTensor:
    """Convert a weight of a file to its prepared layout: the same integers and scales in another order."""
    return QTensor(PREPARED[w.kind], _PREPARE[w.kind](w.fields))


def restore_q2_k(fields: Fields) -> Fields:
    """Undo the planes of Q2_K: the fields of the file."""
    (*n, k16) = fields["q"].shape
    words = jnp.swapaxes(fields["q"].reshape(*n, 8, k16 // 8), -1, -2)
    scales = fields["scales"].reshape(*n, 2, 4, k16 // 8)  # half, plane, group of 128
    return {
        "q": lax.bitcast_convert_type(words, jnp.uint8).reshape(*n, -1),
        "scales": jnp.moveaxis(scales, (-1, -2, -3), (-3, -2, -1)).reshape(*n, -1),
        "d": fields["d"],
        "dmin": fields["dmin"],
    }


def iq2_xxs_words(fields: Fields) -> Array:
    """Decode the prepared IQ2_XXS: f32 [..., K]. w = d * scale / 8 * magnitude * sign."""
    code0, code1, sign = (fields[name][..., None, None] for name in ("code0", "code1", "sign"))
    shape = (*fields["sign"].shape, 4, 8)
    quarter, element = (lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 2 + i) for i in range(2))
    element = 4 * element
    code = jnp.where(quarter < 2, code0, code1) >> (element + 2 * (quarter & 1)) & 3  # [..., groups, 4, 8]
    magnitude = (8 + 17 * code + (code >> 1)).astype(jnp.float32)
    signed = jnp.where(sign >> (element + quarter) & 1 == 1, -magnitude, magnitude)
    scale = fields["scale"].astype(jnp.float32) * jnp.repeat(fields["d"].astype(jnp.float32), 8, axis=-1) * 0.125
    return (scale[..., None, None] * signed).reshape(*scale.shape[:-1], -1)


def _prepare_iq2_xxs(fields: Fields) -> Fields:
    """Replace codebook indices by the magnitudes they stand for: per 32 weights two words of 2-bit codes and one of signs.

    In each word nibble n belongs to element n of four sub-vectors of eight: codes of sub-vectors 0 and 1 (2 and 3) share a word, signs of
    all four do. So a mask and a shift leave eight selectors (sign, code) that one byte permutation turns into weights.
    """
    index, signs = fields["index"], fields["signs"]
    table = jnp.asarray(SELECTORS)
    codes = [_spread_pairs(table[index >> 8 * i & 255]) for i in range(4)]
    patterns = [signs >> 7 * i & 127 for i in range(4)]
    bits = [_spread_bits(p | (lax.population_count(p) & 1) << 7) for p in patterns]
    return {
        "code0": codes[0] | codes[1] << 2,
        "code1": codes[2] | codes[3] << 2,
        "sign": bits[0] | bits[1] << 1 | bits[2] << 2 | bits[3] << 3,
        "scale": (2 * (signs >> 28) + 1).astype(jnp.uint8),
        "d": fields["d"],
    }


def _prepare_q2_k(fields: Fields) -> Fields:
    """Put words and scales into planes. A group is 128 weights: eight words, each with four weights at every one of four shifts."""
    (*n, k4) = fields["q"].shape
    words = lax.bitcast_convert_type(fields["q"].reshape(*n, k4 // 32, 8, 4), jnp.uint32)
    scales = fields["scales"].reshape(*n, k4 // 32, 4, 2)  # group, plane, half
    return {
        "q": jnp.swapaxes(words, -1, -2).reshape(*n, -1),
        "scales": jnp.moveaxis(scales, (-1, -2, -3), (-3, -2, -1)).reshape(*n, -1),
        "d": fields["d"],
        "dmin": fields["dmin"],
    }


def _spread_pairs(x: Array) -> Array:
    """Move the eight 2-bit fields of a 16-bit number to the low ends of eight nibbles."""
    x = (x | x << 8) & 0x00FF00FF
    x = (x | x << 4) & 0x0F0F0F0F
    return (x | x << 2) & 0x33333333


def _spread_bits(x: Array) -> Array:
    """Move the eight bits of a byte to the low ends of eight nibbles."""
    x = (x | x << 12) & 0x000F000F
    x = (x | x << 6) & 0x03030303
    return (x | x << 3) & 0x11111111


_PREPARE = {"IQ2_XXS": _prepare_iq2_xxs, "Q2_K": _prepare_q2_k}
