"""Decode prepared weights inside kernels into float16 planes, for tensor cores.

Plane p of a tile of weights holds value p of every group of 32: [rows, groups]. A field of a prepared layout has one element a group, so
a plane comes from its words element by element and no tile changes its shape. Activations lie in planes too (`to_planes`): a product over
all values is the sum of the planes' products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels import launch

GROUP = 32  # values of a group, and planes
# Planes hold weights times 64: scales of small weights stay normal float16 numbers, and weights up to 1000 are finite.
SCALE_UP = 64.0
_ONES = 0x6400  # float16 1024: a byte in its low bits adds the byte's value, exactly
_MIDDLE = 64  # what `_permute` adds to the signed magnitudes of IQ2_XXS, to make bytes without a sign of them

WORDS = 8  # in which planes come, four at a time
Word = Callable[[jax.Array], list[jax.Array]]  # its number (which need not be known when a kernel is traced) -> planes 4i .. 4i + 3
Read = Callable[[str], jax.Array]  # name of a field -> its tile [rows, groups]: words int32, d and dmin f32 spread over their groups


def to_planes(x: jax.Array, joined: int) -> jax.Array:
    """Bring rows [M, K] into planes, `joined` of them side by side: f16 [M, 32 / joined, K/32 * joined]."""
    m, k = x.shape
    return jnp.swapaxes(x.reshape(m, k // GROUP, GROUP // joined, joined), 1, 2).reshape(m, GROUP // joined, -1).astype(jnp.float16)


def join(planes: Sequence[jax.Array]) -> jax.Array:
    """Put n planes [rows, groups] side by side, group by group: [rows, groups * n]."""
    if len(planes) == 1:
        return planes[0]
    both = jnp.stack([join(planes[::2]), join(planes[1::2])], axis=-1)
    return both.reshape(both.shape[0], -1)


def _iq2_xxs(read: Read) -> Word:
    scale = (read("d") * read("scale").astype(jnp.float32) * (SCALE_UP / 8)).astype(jnp.float16)
    codes, sign = (read("code0"), read("code1")), read("sign")

    def word(i: jax.Array) -> list[jax.Array]:
        quarter, half = i >> 1, i & 1
        # One shift brings the quarter's sign to bit 2 of its nibble.
        place = jnp.where(i < 4, sign << 2, sign) >> (quarter & 1)
        selector = (jnp.where(i < 4, *codes) >> 2 * (quarter & 1) & 0x33333333) | (place & 0x44444444)
        return _from_bytes(_permute(selector >> 16 * half), _MIDDLE, scale)

    return word


def _q2_k(read: Read) -> Word:
    words = read("q0"), read("q1")
    d, dmin, scales = read("d") * SCALE_UP, read("dmin") * SCALE_UP, [read(f"scales{half}").astype(jnp.int32) for half in range(2)]
    scale = [(d * (s & 15).astype(jnp.float32)).astype(jnp.float16) for s in scales]
    least = [(dmin * (s >> 4).astype(jnp.float32)).astype(jnp.float16) for s in scales]

    def word(i: jax.Array) -> list[jax.Array]:
        first = i < 4
        low = jnp.where(first, *words) >> 2 * (i & 3) & 0x03030303
        return _from_bytes(low, 0, jnp.where(first, scale[0], scale[1]), jnp.where(first, least[0], least[1]))

    return word


def _q4_k(read: Read) -> Word:
    scale = (read("d") * SCALE_UP * read("scale").astype(jnp.float32)).astype(jnp.float16)
    least = (read("dmin") * SCALE_UP * read("least").astype(jnp.float32)).astype(jnp.float16)
    q0, q1, q2, q3 = (read(f"q{i}") for i in range(4))

    def word(i: jax.Array) -> list[jax.Array]:
        packed = jnp.where(i < 4, jnp.where(i < 2, q0, q1), jnp.where(i < 6, q2, q3))
        return _from_bytes(packed >> 4 * (i & 1) & 0x0F0F0F0F, 0, scale, least)

    return word


def _permute(selector: jax.Array) -> jax.Array:
    """Turn four selectors (sign << 2 | code), the low nibbles of a word, into bytes: 64 +- 8, 25 or 43."""

    def meaning(selector: jax.Array) -> jax.Array:
        # Four bytes side by side in a word: none of these sums leaves its byte.
        nibble = (selector & 0xFF) | (selector & 0xFF00) << 8
        nibble = (nibble | nibble << 4) & 0x0F0F0F0F
        code, minus = nibble & 0x03030303, nibble >> 2 & 0x01010101
        magnitude = 0x08080808 + 17 * code + (code >> 1 & 0x01010101)
        return _MIDDLE * 0x01010101 + magnitude - 2 * (magnitude & 255 * minus)

    return launch.assembly("prmt.b32 $0, 0x006B5948, 0x00152738, $1;", [selector], meaning)


def _from_bytes(word: jax.Array, bias: int, scale: jax.Array, least: jax.Array | None = None) -> list[jax.Array]:
    return [_from_byte(word, byte, bias, scale, least) for byte in range(4)]


def _from_byte(word: jax.Array, byte: int, bias: int, scale: jax.Array, least: jax.Array | None = None) -> jax.Array:
    """Compute (byte - bias) * scale - least in float16, for one byte of every word.

    Two neighbours of a tile share the registers of one instruction, for which a compiler would not pair them by itself.
    """
    if launch.interpreted():
        whole = (word >> 8 * byte & 255) - bias
        product = whole.astype(jnp.float32) * scale.astype(jnp.float32)
        return (product if least is None else product - least.astype(jnp.float32)).astype(jnp.float16)
    bytes_of_both = f"0x0{4 + byte:x}0{byte:x}"  # of the first word in the low half, of the second in the high one
    ones = f"0x{_ONES:04x}{_ONES:04x}"
    subtrahend = f"0x{_ONES + bias:04x}{_ONES + bias:04x}"
    last = "mul.f16x2 $0, h, $3;" if least is None else "neg.f16x2 m, $4; fma.rn.f16x2 $0, h, $3, m;"
    code = f"""{{ .reg .b32 h, m, c, o;
        prmt.b32 h, $1, $2, {bytes_of_both};
        lop3.b32 h, h, 0x00ff00ff, {ones}, 0xea;
        mov.b32 c, {subtrahend};
        sub.f16x2 h, h, c;
        {last} }}"""
    operands = [word, scale] if least is None else [word, scale, least]
    shape = jax.ShapeDtypeStruct(word.shape, jnp.float16)
    constraints = ",".join(["=r"] + ["r"] * (len(operands) + 1))  # a word has 32 bits: two registers; two float16 share one
    return plt.elementwise_inline_asm(code, args=operands, constraints=constraints, pack=2, result_shape_dtypes=[shape])[0]


# Prepared layout -> what decodes a tile, given what reads its fields.
PLANES: Mapping[str, Callable[[Read], Word]] = MappingProxyType({"IQ2_XXS:words": _iq2_xxs, "Q2_K:words": _q2_k, "Q4_K:words": _q4_k})
