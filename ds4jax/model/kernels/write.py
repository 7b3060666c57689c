"""Write a row of the cache inside a kernel: normalised, rotated, in whatever format the cache stores.

A row is two tiles [blocks, 32]: the even and the odd channels of blocks of 64. So a pair that rotates stands at one place of
both tiles, the last block is the one that rotates, and no value has to change its place. Tiles have a power of two of
blocks; those that fill up are zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from ds4jax.model import rounding

BLOCK = rounding.FP8_BLOCK
PAIRS = BLOCK // 2
PARTS = {"f32": ("x",), "bf16": ("x",), "fp8": ("code", "exponent", "tail"), "fp4": ("code", "exponent")}  # in operand order

Row = tuple[jax.Array, jax.Array]  # even and odd channels


@dataclass(frozen=True)
class Shape:
    """Where the values of a row of `width` channels stand in its tiles."""

    width: int

    @property
    def n_block(self) -> int:
        """Blocks that are real."""
        return self.width // BLOCK

    @property
    def block(self) -> jax.Array:
        """Numbers of the tiles' blocks."""
        return jnp.arange(1 << (self.n_block - 1).bit_length())

    @property
    def real(self) -> jax.Array:
        """Which places hold channels."""
        return jnp.broadcast_to(self.block[:, None] < self.n_block, (len(self.block), PAIRS))

    def channel(self, parity: int) -> jax.Array:
        """Channels of the even (0) or the odd tile (1)."""
        return self.block[:, None] * BLOCK + 2 * jnp.arange(PAIRS)[None, :] + parity

    def load(self, at: Any, mask: jax.Array | None = None, other: float = 0.0) -> Row:
        """Read the tiles from at(channels), a reference to as many values; `mask` may exclude some of those that are real."""
        mask = self.real if mask is None else self.real & mask
        even, odd = (plt.load(at(self.channel(parity)), mask=mask, other=other) for parity in (0, 1))
        return even, odd


def finish(row: Row, weight: Row, angle: jax.Array, position: jax.Array, shape: Shape, eps: float) -> Row:
    """Normalise a row by the weight given in the same tiles, and rotate its last block: `rms_norm`, then `rope.rotate`.

    angle: f32 [32], of a pair at position 1.
    """
    square = jnp.sum(row[0] * row[0] + row[1] * row[1])
    root = 1 / jnp.sqrt(square / shape.width + eps)
    even, odd = (x * root * w for x, w in zip(row, weight, strict=True))
    theta = position.astype(jnp.float32) * angle
    cos, sin = jnp.cos(theta)[None, :], jnp.sin(theta)[None, :]
    turns = (shape.block == shape.n_block - 1)[:, None]
    return jnp.where(turns, even * cos - odd * sin, even), jnp.where(turns, even * sin + odd * cos, odd)


def store(refs: Any, format: str, at: tuple[Any, Any, Any], row: Row, shape: Shape) -> None:
    """Store an attention row, or an index row that is not rounded, at (layer, slot, row)."""
    if format != "fp8":
        for parity, x in enumerate(row):
            plt.store(refs[0].at[*at, shape.channel(parity)], x.astype(refs[0].dtype), mask=shape.real)
        return
    code_ref, exponent_ref, tail_ref = refs
    exponent = rounding.fp8_exponent(jnp.max(jnp.maximum(jnp.abs(row[0]), jnp.abs(row[1])), axis=1))
    rounded = shape.block < shape.n_block - 1
    plt.store(exponent_ref.at[*at, shape.block], exponent.astype(jnp.int8), mask=rounded)
    scale, tail = rounding.exp2_int(-exponent)[:, None], shape.n_block - 1
    for parity, x in enumerate(row):
        channel = shape.channel(parity)
        scaled = jnp.where(x != x, x, jnp.clip(x * scale, -448.0, 448.0))  # a clip may lose what is no number
        code = jax.lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8).astype(jnp.int32)
        code = jnp.where(x == 0, 0, code).astype(jnp.uint8)  # -0.0 becomes 0.0
        plt.store(code_ref.at[*at, channel], code, mask=jnp.broadcast_to(rounded[:, None], channel.shape))
        last = jnp.broadcast_to((shape.block == tail)[:, None], channel.shape)
        plt.store(tail_ref.at[*at, channel - tail * BLOCK], x.astype(jnp.float16), mask=last)


def store_mixed(refs: Any, at: tuple[Any, Any, Any], row: Row, shape: Shape) -> None:
    """Multiply an index row by the Hadamard matrix, round it to FP4 and store it at (layer, slot, row).

    Of the products with the even and the odd channels apart, sums are the even channels of the result, differences the odd ones.
    Byte j of a block of 32 holds elements j and j + 16: of its 16 pairs the first 8 meet the last 8.
    """
    code_ref, exponent_ref = refs
    n, half = shape.width // rounding.FP4_BLOCK, rounding.FP4_BLOCK // 4
    even, odd = (x.reshape(shape.width // 2, 1) for x in row)
    i, j = jnp.arange(shape.width // 2)[:, None], jnp.arange(n * half)
    parts = []
    for first in (0, half):
        k = j // half * (2 * half) + first + j % half
        minus = (jax.lax.population_count(i & k[None, :]) & 1) == 1
        a, b = (jnp.sum(jnp.where(minus, -x, x), axis=0).reshape(n, half) for x in (even, odd))
        parts.append(((a + b) * (1 / math.sqrt(shape.width)), (a - b) * (1 / math.sqrt(shape.width))))
    low, high = parts
    size = jnp.maximum(jnp.maximum(jnp.abs(low[0]), jnp.abs(low[1])), jnp.maximum(jnp.abs(high[0]), jnp.abs(high[1])))
    exponent = rounding.fp4_exponent(jnp.max(size, axis=1))
    scale = rounding.exp2_int(-exponent)[:, None]
    block, byte = jnp.arange(n), 2 * jnp.arange(half)
    for parity in (0, 1):
        packed = _e2m1(low[parity] * scale) | _e2m1(high[parity] * scale) << 4
        plt.store(code_ref.at[*at, block[:, None] * (2 * half) + byte[None, :] + parity], packed.astype(jnp.uint8))
    plt.store(exponent_ref.at[*at, block], exponent.astype(jnp.int8))


def _e2m1(x: jax.Array) -> jax.Array:
    """Code of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code; the sign on top."""
    size = jnp.abs(x)
    code = sum((size >= t if i % 2 else size > t).astype(jnp.int32) for i, t in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))
    return code | jnp.where(x < 0, 8, 0)
