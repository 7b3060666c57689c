"""Read tiles of a cache's rows inside a kernel, in whatever format the cache stores them.

An attention row comes as blocks of channels, because tiles must be powers of two and 448 + 64 channels are not; an FP8 block
stays unscaled, its power-of-two scale a row beside it: the scale is cheaper to apply to what a product gives, or to the weights
that meet it, than to each value. FP8 values are exact in float16 (as is the float16 tail), other formats become bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from ds4jax.model.cache import Rows
from ds4jax.model.rounding import FP4_BLOCK, FP8_BLOCK, exp2_int

BLOCK = FP8_BLOCK  # channels of an attention row that are read together
HALF = FP4_BLOCK // 2
_MIN_DOT = 16  # Triton multiplies no smaller tiles


@dataclass(frozen=True)
class RowLayout:
    """How rows are stored: format and n_rot as in `Rows`, names of the parts in operand order, channels of a row."""

    format: str
    n_rot: int
    names: tuple[str, ...]
    width: int
    n_row: int

    @classmethod
    def of(cls, rows: Rows) -> RowLayout:
        """Describe a cache's rows."""
        channels = {"fp8": lambda p: p["code"].shape[-1] + p["tail"].shape[-1], "fp4": lambda p: 2 * p["code"].shape[-1]}
        width = channels.get(rows.format, lambda p: p["x"].shape[-1])(rows.parts)
        return cls(rows.format, rows.n_rot, tuple(sorted(rows.parts)), width, rows.n_row)

    @property
    def dtype(self) -> Any:
        """Type in which the blocks of attention rows meet queries: exact for what is stored, where 16 bits can be."""
        return jnp.float16 if self.format == "fp8" else jnp.bfloat16

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """First channel and width of each block of an attention row; the last one holds the rotated channels."""
        n_plain = self.width - self.n_rot
        return [(c, BLOCK) for c in range(0, n_plain, BLOCK)] + [(n_plain, self.n_rot)]


def operands(rows: Rows) -> list[jax.Array]:
    """Return the arrays of stored rows in the order in which `RowLayout.names` lists them."""
    return [rows.parts[name] for name in sorted(rows.parts)]


def fits(rows: Rows) -> bool:
    """Whether kernels can read attention rows like these: blocks of 64 plain channels and a power of two, 16 at least, of rotated ones."""
    layout = RowLayout.of(rows)
    blocks = (layout.width - layout.n_rot) % BLOCK == 0 and layout.n_rot >= _MIN_DOT and layout.n_rot & (layout.n_rot - 1) == 0
    return layout.format != "fp4" and blocks and addressable(rows)


def addressable(rows: Rows) -> bool:
    """Whether a kernel's offsets reach all of the rows.

    Pallas counts elements in 32 bits, signed, up to arrays of 4 GiB, so of arrays of bytes between 2 and 4 GiB it reaches half.
    """
    return all(a.size < 1 << 31 or a.size * a.dtype.itemsize > 1 << 32 for a in rows.parts.values())


def used_position(slot_ref: Any, position_ref: Any, row: jax.Array, n_slot: int) -> tuple[jax.Array, jax.Array]:
    """Return slot and position of a batch row; one that nobody uses reads the last slot's first token, the cheapest there is."""
    slot, position = slot_ref[row], position_ref[row]
    return jnp.minimum(slot, n_slot - 1), jnp.where(slot < n_slot, position, 0)


def tile(row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the indices of a tile, int32 [R, C] each, from numbers of rows [R] and of columns [C]."""
    shape = (row.shape[0], column.shape[0])
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)


def read_blocks(
    refs: Mapping[str, Any], layout: RowLayout, layer: jax.Array, slot: jax.Array, row: jax.Array, seen: jax.Array
) -> list[tuple[jax.Array, jax.Array | None]]:
    """Read attention rows as blocks of channels.

    Args:
        refs: the parts, whole arrays [L, S, rows, ...]. row: int32 [R], numbers; seen: bool [R], others read as zero.

    Returns:
        for each of `layout.blocks` the values [R, width] and the factors f32 [R] they lack, None if none.
    """

    def part(name: str, first: int, width: int) -> jax.Array:
        return plt.load(refs[name].at[layer, slot, *tile(row, first + jnp.arange(width))], mask=seen[:, None], other=0)

    if layout.format != "fp8":
        return [(part("x", first, width).astype(layout.dtype), None) for first, width in layout.blocks]
    blocks: list[tuple[jax.Array, jax.Array | None]] = []
    for i, (first, width) in enumerate(layout.blocks[:-1]):
        code = jax.lax.bitcast_convert_type(part("code", first, width), jnp.float8_e4m3fn)
        exponent = plt.load(refs["exponent"].at[layer, slot, row, i], mask=seen, other=0)
        blocks.append((code.astype(jnp.float16), exp2_int(exponent)))
    return [*blocks, (part("tail", 0, layout.n_rot), None)]


def read_keys(
    refs: Mapping[str, Any], layout: RowLayout, layer: jax.Array, slot: jax.Array, row: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Read indexer keys in two halves, bf16 [R, width / 2]; arguments as in `read_blocks`.

    A byte of FP4 holds two channels that lie 16 apart, so one half has the channels of all low nibbles, in their order, the other
    those of the high ones. Of other formats the halves are the first and the last channels.
    """
    half = layout.width // 2
    column = jnp.arange(half)

    def part(name: str, columns: jax.Array) -> jax.Array:
        return plt.load(refs[name].at[layer, slot, *tile(row, columns)], mask=seen[:, None], other=0)

    if layout.format != "fp4":
        return part("x", column).astype(jnp.bfloat16), part("x", column + half).astype(jnp.bfloat16)
    code, exponent = part("code", column).astype(jnp.uint16), part("exponent", column // HALF)
    # Magnitude bits in the place of float16's lowest exponent and highest mantissa bits read as value * 2**-14, 0.5 included.
    scale = exp2_int(exponent.astype(jnp.int32) + 14)

    def value(nibble: jax.Array) -> jax.Array:
        bits = (nibble & jnp.uint16(7)) << jnp.uint16(9) | (nibble & jnp.uint16(8)) << jnp.uint16(12)
        return (jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * scale).astype(jnp.bfloat16)

    return value(code & jnp.uint16(15)), value(code >> jnp.uint16(4))
