"""Read and write rows of the cache inside a kernel, in blocks of 64 channels, in each format that the cache stores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from ds4jax.model.cache import Rows

BLOCK = 64  # channels at a time; the rotated channels are the last block

# Arrays of a format, in the order in which kernels take them.
PARTS = {"f32": ("x",), "bf16": ("x",), "fp8": ("code", "exponent", "tail"), "fp4": ("code", "exponent")}


def parts_of(rows: Rows) -> list[jax.Array]:
    """List the arrays of rows in the order in which kernels take them."""
    return [rows.parts[name] for name in PARTS[rows.format]]


def exp2(exponent: jax.Array) -> jax.Array:
    """2**exponent as f32, from its bits; for exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def load_block(refs: Any, format: str, layer: Any, slot: Any, row: jax.Array, block: int, n_block: int, seen: jax.Array) -> jax.Array:
    """Read block `block` of attention rows: f32 [len(row), 64], 0 where seen (bool, as row) is false."""
    column, mask = jnp.arange(BLOCK)[None, :], jnp.broadcast_to(seen[:, None], (row.shape[0], BLOCK))
    at = row[:, None]
    if format != "fp8":
        return plt.load(refs[0].at[layer, slot, at, block * BLOCK + column], mask=mask, other=0.0).astype(jnp.float32)
    code, exponent, tail = refs
    if block == n_block - 1:
        return plt.load(tail.at[layer, slot, at, column], mask=mask, other=0.0).astype(jnp.float32)
    codes = plt.load(code.at[layer, slot, at, block * BLOCK + column], mask=mask, other=0)
    scale = exp2(plt.load(exponent.at[layer, slot, row, block], mask=seen, other=0))
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32) * scale[:, None]
