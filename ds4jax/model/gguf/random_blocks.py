"""Random weights, drawn directly in the block formats of GGUF: no float copy is made, so a file of any size can be written.

Every block is a valid one. Its payload is random bits; the scale is chosen so that the decoded weights have mean 0
and the standard deviation asked for. That standard deviation is measured by decoding a sample, not derived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Blocks = np.ndarray


def _fill(rng: np.random.Generator, region: np.ndarray) -> None:
    """Fill a region of the blocks with random bits."""
    region[:] = np.frombuffer(rng.bytes(region.size), np.uint8).reshape(region.shape)


def _write_f16(region: np.ndarray, values: np.ndarray) -> None:
    """Store one f16 a block in the two bytes of `region` [n, 2]."""
    region[:] = values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _draw_q8_0(rng: np.random.Generator, blocks: Blocks, d: np.ndarray) -> None:
    _write_f16(blocks[:, :2], d)
    _fill(rng, blocks[:, 2:])
    quants = blocks[:, 2:].view(np.int8)
    np.maximum(quants, -127, out=quants)  # the quantiser never makes -128


def _draw_q2_k(rng: np.random.Generator, blocks: Blocks, d: np.ndarray) -> None:
    scale = rng.integers(4, 16, (len(blocks), 16), np.uint8)
    blocks[:, :16] = scale * 17  # scale and minimum alike in both nibbles ...
    _fill(rng, blocks[:, 16:80])
    _write_f16(blocks[:, 80:82], d)
    _write_f16(blocks[:, 82:84], d * 1.5)  # ... so that quants 0..3 are centred


def _draw_q4_k(rng: np.random.Generator, blocks: Blocks, d: np.ndarray) -> None:
    _write_f16(blocks[:, :2], d)
    _write_f16(blocks[:, 2:4], d * 7.5)  # centres quants 0..15, with minima equal to the scales
    scale = rng.integers(16, 64, (len(blocks), 8), np.uint8)
    low, high = scale[:, :4], scale[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4) << 6
    blocks[:, 12:16] = (high & 15) * 17
    _fill(rng, blocks[:, 16:])


def _draw_iq2_xxs(rng: np.random.Generator, blocks: Blocks, d: np.ndarray) -> None:
    _write_f16(blocks[:, :2], d)
    _fill(rng, blocks[:, 2:])


_DRAW: dict[str, Callable[[np.random.Generator, Blocks, np.ndarray], None]] = {
    "Q8_0": _draw_q8_0,
    "Q2_K": _draw_q2_k,
    "Q4_K": _draw_q4_k,
    "IQ2_XXS": _draw_iq2_xxs,
}


def block_size(kind: str) -> tuple[int, int]:
    """Return (values, bytes) of one block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


def random_blocks(rng: np.random.Generator, kind: str, shape: tuple[int, ...], std: float | np.ndarray) -> np.ndarray:
    """Draw a quantised tensor.

    Args:
        kind: GGML type name.
        shape: logical shape, NumPy order; the last axis must be a multiple of the block's values.
        std: of the decoded weights; a number, or one a row of the last axis (shape[:-1]).

    Returns:
        uint8 [*shape[:-1], bytes of a row].
    """
    values, size = block_size(kind)
    blocks_per_row = shape[-1] // values
    n_rows = prod(shape[:-1])
    row_d = np.broadcast_to(np.asarray(std, np.float32) / _unit_std(kind), shape[:-1]).reshape(n_rows)
    return _blocks(rng, kind, np.repeat(row_d, blocks_per_row)).reshape(*shape[:-1], blocks_per_row * size)


def _blocks(rng: np.random.Generator, kind: str, d: np.ndarray) -> Blocks:
    """Draw len(d) blocks whose scales lie around d."""
    blocks = np.empty((len(d), block_size(kind)[1]), np.uint8)
    _DRAW[kind](rng, blocks, d * rng.uniform(0.8, 1.2, len(d)).astype(np.float32))
    return blocks


@cache
def _unit_std(kind: str) -> float:
    """Measure the standard deviation that blocks of scale 1 decode to."""
    sample = _blocks(np.random.default_rng(0), kind, np.ones(1024, np.float32))
    return float(dequantize(sample, GGMLQuantizationType[kind]).std())
