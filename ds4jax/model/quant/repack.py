"""Put experts' weights into the order that kernels read: whole words, nothing to look up, nothing lost.

Weights meet activations in groups of 32 that share a scale. Every field here has one element for a group, [..., N, K/32] (but d and dmin,
one for 256), so that a kernel decodes tiles [rows, groups] element by element and never reshapes one. What a word holds decodes, with a
mask and at most a shift, to words of four bytes: consecutive values 4w .. 4w + 3 of the group, the first in the low byte. Activations come
in the same words (`kernels.activations`).

    IQ2_XXS:words   code0, code1, sign: see `_prepare_iq2_xxs`; scale: odd, 1 to 31. w = d * scale / 8 * (+-8, 25 or 43)
    Q2_K:words      byte k of q0 holds values 4i + k, i = 0..3, at bits 2i; q1 values 16 + 4i + k. scales0 and scales1 belong to these
                    halves: the scale in the low nibble, the minimum in the high one. w = d * scale * q - dmin * minimum
    Q4_K:words      byte k of q_i holds values 8i + k in the low nibble and 8i + 4 + k in the high one. w = d * scale * q - dmin * least
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax import Array, lax

from ds4jax.model.quant.columns import to_columns
from ds4jax.model.quant.iq2 import SELECTORS
from ds4jax.model.quant.kquants import scales_and_mins
from ds4jax.model.quant.layouts import COLUMNS
from ds4jax.model.quant.qtensor import QTensor

# GGUF type -> the prepared layout that holds the same weights (in `layouts`).
PREPARED: Mapping[str, str] = MappingProxyType({kind: f"{kind}:words" for kind in ("IQ2_XXS", "Q2_K", "Q4_K")})

Fields = dict[str, Array]


def prepare(w: QTensor) -> QTensor:
    """Convert a weight [..., N, K] of a type in PREPARED to its prepared layout: the same integers and scales, row by row."""
    return QTensor(PREPARED[w.kind], _PREPARE[w.kind](w.fields))


def arrange(w: QTensor, to: str) -> QTensor:
    """Convert a weight to the layout `to`: the one that it has, its prepared one, or by columns."""
    if to == w.kind:
        return w
    return to_columns(w) if to == COLUMNS.get(w.kind) else prepare(w)


# ---------------------------------------------------------------- from the file's order
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
    """Transpose 2-bit values: the file has the four planes of 32 values at four shifts of the same bytes."""
    words = _file_words(fields["q"])  # [..., 32-byte runs, 8]
    shift = 2 * lax.broadcasted_iota(jnp.uint32, (*words.shape[:-1], 4), words.ndim - 1)  # of each plane, which is a group

    def half(first: int) -> Array:
        return _joined([(words[..., first + i, None] >> shift & 0x03030303) << 2 * i for i in range(4)])

    scales = fields["scales"]
    return {
        "q0": half(0),
        "q1": half(4),
        "scales0": scales[..., 0::2],
        "scales1": scales[..., 1::2],
        "d": fields["d"],
        "dmin": fields["dmin"],
    }


def _prepare_q4_k(fields: Fields) -> Fields:
    """Bring the two nibbles of a byte into one group: the file has two groups of 32 in the nibbles of the same bytes."""
    words = _file_words(fields["q"])
    shift = 4 * lax.broadcasted_iota(jnp.uint32, (*words.shape[:-1], 2), words.ndim - 1)

    def word(i: int) -> Array:
        return _joined([(words[..., 2 * i + high, None] >> shift & 0x0F0F0F0F) << 4 * high for high in range(2)])

    scale, least = (a.reshape(*a.shape[:-2], -1) for a in scales_and_mins(fields["scales"]))
    return {f"q{i}": word(i) for i in range(4)} | {"scale": scale, "least": least, "d": fields["d"], "dmin": fields["dmin"]}


def _file_words(q: Array) -> Array:
    """View bytes as words, in runs of 32 bytes: uint8 [..., n * 32] -> uint32 [..., n, 8]."""
    return lax.bitcast_convert_type(q.reshape(*q.shape[:-1], -1, 8, 4), jnp.uint32)


def _joined(parts: list[Array]) -> Array:
    """Join words [..., n, m] whose bits do not overlap: [..., n * m]."""
    word = parts[0]
    for part in parts[1:]:
        word = word | part
    return word.reshape(*word.shape[:-2], -1)


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


_PREPARE = {"IQ2_XXS": _prepare_iq2_xxs, "Q2_K": _prepare_q2_k, "Q4_K": _prepare_q4_k}


# ---------------------------------------------------------------- to values, bit-equal to what the file's order decodes to
def iq2_xxs_words(fields: Fields) -> Array:
    """Decode the prepared IQ2_XXS: f32 [..., K]."""
    code0, code1, sign = (fields[name][..., None, None] for name in ("code0", "code1", "sign"))
    quarter, element = _counters(fields["sign"], 4, 8)
    code = jnp.where(quarter < 2, code0, code1) >> (4 * element + 2 * (quarter & 1)) & 3  # [..., groups, 4, 8]
    magnitude = (8 + 17 * code + (code >> 1)).astype(jnp.float32)
    signed = jnp.where(sign >> (4 * element + quarter) & 1 == 1, -magnitude, magnitude)
    scale = _times(fields["d"], fields["scale"]) * 0.125
    return (scale[..., None, None] * signed).reshape(*scale.shape[:-1], -1)


def q2_k_words(fields: Fields) -> Array:
    """Decode the prepared Q2_K: f32 [..., K]."""
    word, byte = _counters(fields["q0"], 4, 4)
    halves = []
    for q, scales in ((fields["q0"], fields["scales0"]), (fields["q1"], fields["scales1"])):
        values = (q[..., None, None] >> (8 * byte + 2 * word) & 3).astype(jnp.float32)
        scale, least = _times(fields["d"], scales & 15), _times(fields["dmin"], scales >> 4)
        halves.append(scale[..., None, None] * values - least[..., None, None])
    return jnp.stack(halves, -3).reshape(*fields["q0"].shape[:-1], -1)


def q4_k_words(fields: Fields) -> Array:
    """Decode the prepared Q4_K: f32 [..., K]."""
    high, byte = _counters(fields["q0"], 2, 4)
    scale, least = (_times(fields[d], fields[s])[..., None, None, None] for d, s in (("d", "scale"), ("dmin", "least")))
    words = [(fields[f"q{i}"][..., None, None] >> (8 * byte + 4 * high) & 15).astype(jnp.float32) for i in range(4)]
    return (scale * jnp.stack(words, -3) - least).reshape(*fields["q0"].shape[:-1], -1)


def _counters(like: Array, *sizes: int) -> list[Array]:
    """Count along each of the axes `sizes` that follow those of `like`: uint32 [*like.shape, *sizes] each."""
    shape = (*like.shape, *sizes)
    return [lax.broadcasted_iota(jnp.uint32, shape, like.ndim + i) for i in range(len(sizes))]


def _times(d: Array, scale: Array) -> Array:
    """Scale the scales of eight groups by the half-precision factor they share: f32 [..., groups], exact."""
    return jnp.repeat(d.astype(jnp.float32), 8, axis=-1) * scale.astype(jnp.float32)
