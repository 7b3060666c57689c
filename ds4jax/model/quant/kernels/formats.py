"""Decode prepared weights inside kernels and multiply them by int8 activations: exact integers, scaled once a group of 32.

`repack` says what the words hold. One entry of FORMATS is all that a kernel knows of a format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt

from ds4jax.model.kernels.launch import assembly, dot4


@dataclass(frozen=True)
class Decoded:
    """A tile of weights [rows, groups]: for every group eight int32 words of four int8 weights, and what scales them."""

    words: list[jax.Array]
    scales: tuple[jax.Array, ...]


@dataclass(frozen=True)
class Row:
    """A row of activations, as tiles [rows, groups]: eight words, scale f32, sums of both halves i32 (see `Int8Rows`)."""

    words: list[jax.Array]
    scale: jax.Array
    sums: tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Format:
    """How a kernel reads one prepared layout.

    fields: names, in the order in which `decode` takes their tiles. decode: tiles -> Decoded. products: what each group adds to the
    product of a weight row and an activation row, f32 [rows, groups].
    """

    fields: tuple[str, ...]
    decode: Callable[..., Decoded]
    products: Callable[[Decoded, Row], jax.Array]


def load(refs: tuple[Any, ...], fields: tuple[str, ...], layer: Any, expert: Any, rows: jax.Array, n_group: int) -> list[jax.Array]:
    """Read fields of `rows` (i32 [R]) of an expert: tiles [R, n_group], words as int32, scales as they are, d and dmin spread as f32."""
    row, group = rows[:, None], jnp.arange(n_group)[None, :]
    tiles = []
    for ref, name in zip(refs, fields, strict=True):
        if name in ("d", "dmin"):  # one for eight groups
            tiles.append(plt.load(ref.at[layer, expert, row, group // 8]).astype(jnp.float32))
        else:
            tile = plt.load(ref.at[layer, expert, row, group])
            tiles.append(jax.lax.bitcast_convert_type(tile, jnp.int32) if tile.dtype == jnp.uint32 else tile)
    return tiles


# ---------------------------------------------------------------- IQ2_XXS:words
def permute(selector: jax.Array) -> jax.Array:
    """Turn four selectors (sign << 2 | code), the low nibbles of a word, into four int8 weights: +-8, 25 or 43."""

    def meaning(selector: jax.Array) -> jax.Array:
        word = jnp.zeros_like(selector)
        for k in range(4):
            nibble = selector >> 4 * k & 7
            code = nibble & 3
            magnitude = 8 + 17 * code + (code >> 1)
            word = word | (jnp.where(nibble >= 4, -magnitude, magnitude) & 255) << 8 * k
        return word

    return assembly("prmt.b32 $0, 0x002B1908, 0x00D5E7F8, $1;", [selector], meaning)


def _decode_iq2_xxs(code0: jax.Array, code1: jax.Array, sign: jax.Array, scale: jax.Array, d: jax.Array) -> Decoded:
    words = []
    for quarter in range(4):
        code = (code0 if quarter < 2 else code1) >> 2 * (quarter & 1)
        # One shift brings the quarter's sign to bit 2 of its nibble.
        place = sign << 2 - quarter if quarter < 2 else sign >> quarter - 2
        selector = (code & 0x33333333) | (place & 0x44444444)
        words += [permute(selector), permute(selector >> 16)]
    return Decoded(words, (d * scale.astype(jnp.float32) * 0.125,))


def _products_iq2_xxs(w: Decoded, x: Row) -> jax.Array:
    return _dot(w.words, x.words).astype(jnp.float32) * (w.scales[0] * x.scale)


# ---------------------------------------------------------------- Q2_K:words
def _decode_q2_k(*tiles: jax.Array) -> Decoded:
    q0, q1, scales0, scales1, d, dmin = tiles
    words = [q >> 2 * i & 0x03030303 for q in (q0, q1) for i in range(4)]
    return Decoded(words, (scales0, scales1, d, dmin))


def _products_q2_k(w: Decoded, x: Row) -> jax.Array:
    *both, d, dmin = w.scales
    total, least = jnp.zeros_like(w.words[0]), jnp.zeros_like(w.words[0])
    for half, packed in enumerate(both):
        scales = packed.astype(jnp.int32)
        run = slice(4 * half, 4 * half + 4)
        total += _dot(w.words[run], x.words[run]) * (scales & 15)
        least += x.sums[half] * (scales >> 4)
    return x.scale * (d * total.astype(jnp.float32) - dmin * least.astype(jnp.float32))


# ---------------------------------------------------------------- Q4_K:words
def _decode_q4_k(*tiles: jax.Array) -> Decoded:
    *quants, scale, least, d, dmin = tiles
    words = [q >> 4 * i & 0x0F0F0F0F for q in quants for i in range(2)]
    return Decoded(words, (d * scale.astype(jnp.float32), dmin * least.astype(jnp.float32)))


def _products_q4_k(w: Decoded, x: Row) -> jax.Array:
    scale, least = w.scales
    sums = (x.sums[0] + x.sums[1]).astype(jnp.float32)
    return x.scale * (scale * _dot(w.words, x.words).astype(jnp.float32) - least * sums)


def _dot(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    total = jnp.zeros_like(a[0])
    for one, other in zip(a, b, strict=True):
        total = dot4(one, other, total)
    return total


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "IQ2_XXS:words": Format(("code0", "code1", "sign", "scale", "d"), _decode_iq2_xxs, _products_iq2_xxs),
        "Q2_K:words": Format(("q0", "q1", "scales0", "scales1", "d", "dmin"), _decode_q2_k, _products_q2_k),
        "Q4_K:words": Format(("q0", "q1", "q2", "q3", "scale", "least", "d", "dmin"), _decode_q4_k, _products_q4_k),
    }
)
