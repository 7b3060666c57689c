"""Quantise activations to int8 with one scale for 32, in the words in which experts' kernels decode their weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch

GROUP = 32  # values that share a scale
PROGRAM_GROUPS = 8  # groups of a program, at most: small, since at one row the launch's latency is all that counts
ROUNDER = 12582912.0  # 1.5 * 2**23: a float32 added to it is rounded to an integer, half to even, which its low bits then hold
ROUNDER_BITS = 0x4B400000


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Rows:
    """Rows of int8 values, packed for `dot4`.

    words: int32 [M, 8, K/32], word w of every group of 32: values 4w .. 4w + 3, the first in the low byte.
    scale: f32 [M, K/32]; value = scale * int8. sums: int32 [M, 2, K/32], of the int8 values of each half group.
    """

    words: jax.Array = field(repr=False)
    scale: jax.Array = field(repr=False)
    sums: jax.Array = field(repr=False)


def quantize_rows(x: jax.Array) -> Int8Rows:
    """Quantise x [M, K], f32 or bf16: a group's scale is its largest magnitude / 127, and values round half to even.

    A group with a NaN or an infinity has the scale NaN, so that whatever meets it becomes NaN.
    """
    m, k = x.shape
    n = k // GROUP
    size = next(s for s in (PROGRAM_GROUPS, 4, 2, 1) if n % s == 0)
    out = [
        jax.ShapeDtypeStruct((m, 8, n), jnp.int32),
        jax.ShapeDtypeStruct((m, n), jnp.float32),
        jax.ShapeDtypeStruct((m, 2, n), jnp.int32),
    ]
    return Int8Rows(*launch(partial(_kernel, size=size), (n // size, m), out, [x], name="quantize", warps=1))


def _kernel(x_ref: Any, words_ref: Any, scale_ref: Any, sums_ref: Any, *, size: int) -> None:
    row, group = pl.program_id(1), pl.program_id(0) * size + jnp.arange(size)
    word, byte = jnp.arange(8), jnp.arange(4)
    at = group[:, None, None] * GROUP + word[None, :, None] * 4 + byte[None, None, :]
    x = plt.load(x_ref.at[row, at]).astype(jnp.float32)  # [size, 8, 4]
    # A maximum of floats loses NaN on a GPU: let infinity stand for it.
    largest = jnp.max(jnp.max(jnp.where(x != x, jnp.inf, jnp.abs(x)), axis=2), axis=1)
    inverse = 127.0 / jnp.where(largest == 0, 1.0, largest)
    q = jax.lax.bitcast_convert_type(x * inverse[:, None, None] + ROUNDER, jnp.int32) - ROUNDER_BITS
    packed = jnp.sum((q & 255) << 8 * byte[None, None, :], axis=2)  # bytes do not overlap, so the sum joins them
    plt.store(words_ref.at[row, word[None, :], group[:, None]], packed)
    plt.store(scale_ref.at[row, group], jnp.where(largest == jnp.inf, jnp.nan, largest * (1 / 127)))
    by_word = jnp.sum(q, axis=2)  # [size, 8]
    for half in range(2):
        plt.store(sums_ref.at[row, half, group], jnp.sum(jnp.where(word[None, :] // 4 == half, by_word, 0), axis=1))
