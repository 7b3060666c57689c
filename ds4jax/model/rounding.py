"""The rounding that DeepSeek V4 was trained with: FP8 attention rows, Hadamard-rotated FP4 indexer rows, half-precision cache rows.

Everything is integer and power-of-two arithmetic on float32: no float8 casts, no logarithms, no divisions. So the bits are the same
eagerly, under jit, on a CPU and on a GPU, and exponents are exact at powers of two. Encoders return what a cache stores; `*_sim` are
decode(encode(x)).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

FP8_BLOCK = 64
FP4_BLOCK = 32
HADAMARD_WIDTH = 128
FP8_LEAST, FP4_LEAST = 1e-4, 6 * 2.0**-126  # blocks of smaller numbers are scaled as if they held this

_F32_BIAS = 127
_F32_MANTISSA_BITS = 23
_F32_MANTISSA_MASK = (1 << _F32_MANTISSA_BITS) - 1
_FP8_NAN = 0x7F


class _SmallFloat(NamedTuple):
    """A float format: mantissa bits, exponent of the smallest normal number, largest value, all bits but the sign."""

    mantissa_bits: int
    lowest: int
    largest: float
    magnitude_bits: int


_E4M3 = _SmallFloat(3, -6, 448.0, 7)
_E2M1 = _SmallFloat(1, 0, 6.0, 3)
_F16 = _SmallFloat(10, -14, 65504.0, 15)


def fp8_encode(x: Array) -> tuple[Array, Array]:
    """Round blocks of 64 to E4M3 with a shared power-of-two scale, ties to even.

    x: f32 [..., n*64]. Returns codes uint8 [..., n*64] and exponents int8 [..., n]; value = E4M3(code) * 2**exponent. NaN stays NaN.
    """
    blocks, exponent = _scaled_blocks(x, FP8_BLOCK, FP8_LEAST, _E4M3)
    codes = jnp.where(jnp.isnan(blocks), jnp.uint8(_FP8_NAN), _encode(blocks, _E4M3))
    return codes.reshape(x.shape), exponent


def fp8_decode(codes: Array, exponent: Array) -> Array:
    """Undo `fp8_encode`: uint8 [..., n*64] and int8 [..., n] -> f32 [..., n*64]."""
    blocks = codes.reshape(*exponent.shape, FP8_BLOCK)
    values = _decode(blocks, exponent[..., None], _E4M3)
    return jnp.where(blocks & _FP8_NAN == _FP8_NAN, jnp.float32(jnp.nan), values).reshape(codes.shape)


def fp4_encode(x: Array) -> tuple[Array, Array]:
    """Round blocks of 32 to E2M1 with a shared power-of-two scale, ties to even.

    x: f32 [..., n*32]. Returns packed uint8 [..., n*16] and exponents int8 [..., n]. Byte j of a block holds element j in its low and
    j + 16 in its high nibble (as Q4_0 and MXFP4 do: unpacking is then two contiguous halves).
    """
    blocks, exponent = _scaled_blocks(x, FP4_BLOCK, FP4_LEAST, _E2M1)
    codes = _encode(blocks, _E2M1)
    half = FP4_BLOCK // 2
    packed = codes[..., :half] | codes[..., half:] << 4
    return packed.reshape(*x.shape[:-1], x.shape[-1] // 2), exponent


def fp4_decode(packed: Array, exponent: Array) -> Array:
    """Undo `fp4_encode`: uint8 [..., n*16] and int8 [..., n] -> f32 [..., n*32]."""
    blocks = packed.reshape(*exponent.shape, FP4_BLOCK // 2)
    codes = jnp.concatenate([blocks & 15, blocks >> 4], -1)
    return _decode(codes, exponent[..., None], _E2M1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def fp8_sim(x: Array) -> Array:
    """Round f32 [..., n*64] as the attention cache does."""
    return fp8_decode(*fp8_encode(x))


def fp4_sim(x: Array) -> Array:
    """Round f32 [..., n*32] as the indexer does."""
    return fp4_decode(*fp4_encode(x))


def hadamard(x: Array) -> Array:
    """Multiply f32 [..., 128] by the natural-order Hadamard matrix over sqrt(128).

    Butterflies from the nearest pairs to the farthest: this order of additions is part of the result, a matrix product gives other bits.
    """
    y, span = x.astype(jnp.float32), 1
    while span < HADAMARD_WIDTH:
        pairs = y.reshape(*x.shape[:-1], HADAMARD_WIDTH // (2 * span), 2, span)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], -2).reshape(x.shape)
        span *= 2
    return y * jnp.float32(1 / math.sqrt(HADAMARD_WIDTH))


def f16_round(x: Array) -> Array:
    """Round f32 of any shape to half precision and back, beyond 65504 to infinity.

    Not a pair of casts: XLA may drop those (it is allowed excess precision), and its reduce-precision would flush subnormals.
    """
    step = _step_exponent(x, _F16)
    # Where step is far below or above 1 its inverse would leave the normal range; half precision is long zero or infinite there.
    step = jnp.minimum(step, _F32_BIAS - _F32_MANTISSA_BITS)
    rounded = jnp.round(x * exp2_int(-step)) * exp2_int(step)
    return jnp.where(jnp.abs(rounded) > _F16.largest, jnp.sign(x) * jnp.float32(jnp.inf), rounded)


def fp8_exponent(amax: Array) -> Array:
    """Exponent of the scale of blocks whose largest magnitude is amax, f32 [...] -> i32 [...]; see `fp8_encode`."""
    return _block_exponent(jnp.maximum(amax, FP8_LEAST), _E4M3)


def fp4_exponent(amax: Array) -> Array:
    """Exponent of the scale of blocks whose largest magnitude is amax, f32 [...] -> i32 [...]; see `fp4_encode`."""
    return _block_exponent(jnp.maximum(amax, FP4_LEAST), _E2M1)


def _block_exponent(amax: Array, fmt: _SmallFloat) -> Array:
    """ceil(log2(amax / largest)) without rounding: amax = m * 2**e and largest = m' * 2**e' give e - e' + (m > m')."""
    mantissa, e = math.frexp(fmt.largest)  # mantissa in [0.5, 1)
    largest_fraction = int((2 * mantissa - 1) * (1 << _F32_MANTISSA_BITS))
    fraction = lax.bitcast_convert_type(amax, jnp.int32) & _F32_MANTISSA_MASK
    return _exponent(amax) - (e - 1) + (fraction > largest_fraction).astype(jnp.int32)


def _scaled_blocks(x: Array, block: int, least: float, fmt: _SmallFloat) -> tuple[Array, Array]:
    """Divide each block by the smallest power of two that brings it within the format: ([..., n, block], exponent int8 [..., n])."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // block, block)  # no -1: there may be no rows
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), -1), least)
    exponent = _block_exponent(amax, fmt)
    scaled = blocks * exp2_int(-exponent)[..., None]
    return jnp.clip(scaled, -fmt.largest, fmt.largest), exponent.astype(jnp.int8)


def _encode(y: Array, fmt: _SmallFloat) -> Array:
    """Code of the nearest small float, uint8, sign bit on top; y is within the format."""
    step = _step_exponent(y, fmt)
    steps = jnp.round(jnp.abs(y) * exp2_int(-step)).astype(jnp.int32)
    # Exponent field 0 (subnormal) counts plain steps, and a carry out of the mantissa is the next exponent: one sum serves all cases.
    magnitude = ((step + fmt.mantissa_bits - fmt.lowest) << fmt.mantissa_bits) + steps
    negative = (y < 0).astype(jnp.int32)  # not the sign bit: -0.0 becomes +0.0, as in ds4
    return (magnitude | negative << fmt.magnitude_bits).astype(jnp.uint8)


def _decode(codes: Array, exponent: Array, fmt: _SmallFloat) -> Array:
    """Value of small-float codes times 2**exponent, f32."""
    code = codes.astype(jnp.int32)
    magnitude = code & ((1 << fmt.magnitude_bits) - 1)
    field = magnitude >> fmt.mantissa_bits
    steps = (magnitude & ((1 << fmt.mantissa_bits) - 1)) + jnp.where(field > 0, 1 << fmt.mantissa_bits, 0)
    step = jnp.maximum(field, 1) - 1 + fmt.lowest - fmt.mantissa_bits
    value = steps.astype(jnp.float32) * exp2_int(step + exponent.astype(jnp.int32))
    return jnp.where(code >> fmt.magnitude_bits > 0, -value, value)


def _step_exponent(x: Array, fmt: _SmallFloat) -> Array:
    """Exponent of the distance between neighbouring small floats at x, i32."""
    return jnp.maximum(_exponent(x), fmt.lowest) - fmt.mantissa_bits


def _exponent(x: Array) -> Array:
    """floor(log2|x|) as i32, -127 for zero and subnormals, 128 for infinities and NaN."""
    return ((lax.bitcast_convert_type(x, jnp.int32) >> _F32_MANTISSA_BITS) & 0xFF) - _F32_BIAS


def exp2_int(exponent: Array) -> Array:
    """2**exponent as f32, for exponents of normal numbers (-126 to 127)."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + _F32_BIAS) << _F32_MANTISSA_BITS, jnp.float32)
