"""Quantise activations to int8 with one scale for 32, in the order in which experts' kernels read their weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import launch

GROUP = 32  # values that share a scale
GROUPS = 16  # that a program quantises


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Rows:
    """Rows of int8 values, packed for `dot4`.

    words: int32 [M, 8 * K/32]: word w of every group of 32, plane by plane (elements 4w .. 4w+3, the first in the low byte).
    scale: f32 [M, K/32]. sums: f32 [M, 2 * K/32], of the int8 values of each half group, first halves first.
    """

    words: jax.Array
    scale: jax.Array
    sums: jax.Array


def quantize_rows(x: jax.Array) -> Int8Rows:
    """Quantise x [M, K]: scale = largest magnitude of 32 / 127, values rounded to the nearest. A NaN taints its group."""
    m, k = x.shape
    n = k // GROUP
    size = next(s for s in (GROUPS, 8, 4, 2, 1) if n % s == 0)
    out = [
        jax.ShapeDtypeStruct((m, 8 * n), jnp.int32),
        jax.ShapeDtypeStruct((m, n), jnp.float32),
        jax.ShapeDtypeStruct((m, 2 * n), jnp.float32),
    ]
    return Int8Rows(*launch(partial(_kernel, n=n, size=size), (n // size, m), out, [x], name="quantize", warps=1))


def _kernel(x_ref: Any, words_ref: Any, scale_ref: Any, sums_ref: Any, *, n: int, size: int) -> None:
    row, group = pl.program_id(1), pl.program_id(0) * size + jnp.arange(size)
    word, byte = jnp.arange(8), jnp.arange(4)
    at = group[:, None, None] * GROUP + word[None, :, None] * 4 + byte[None, None, :]
    x = plt.load(x_ref.at[row, at]).astype(jnp.float32)  # [size, 8, 4]
    broken = jnp.max(jnp.max(jnp.where(x != x, 1.0, 0.0), axis=2), axis=1)
    largest = jnp.max(jnp.max(jnp.abs(x), axis=2), axis=1)
    scale = jnp.where(broken > 0, jnp.nan, largest * (1 / 127.0))
    inverse = jnp.where(largest == 0, 0.0, 127.0 / jnp.where(largest == 0, 1.0, largest))
    q = jnp.where(x != x, 0.0, jnp.floor(x * inverse[:, None, None] + 0.5)).astype(jnp.int32)
    packed = jnp.sum((q & 255) << 8 * byte[None, None, :], axis=2)  # [size, 8]: bytes do not overlap, so the sum joins them
    plt.store(words_ref.at[row, word[None, :] * n + group[:, None]], packed)
    plt.store(scale_ref.at[row, group], scale)
    by_word = jnp.sum(q, axis=2).astype(jnp.float32)  # [size, 8]
    for half in range(2):
        mine = (word // 4 == half)[None, :]
        plt.store(sums_ref.at[row, half * n + group], jnp.sum(jnp.where(mine, by_word, 0.0), axis=1))
