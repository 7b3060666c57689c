"""The k-quants: super-blocks of 256 values whose sub-blocks of 16 or 32 have small integer scales, scaled in turn by one half-precision d.

Fields are [..., n * count] for n super-blocks, as in `layouts`; every decoder returns f32 [..., n * 256].

All products are exact in float32: d has 11 significant bits, a scale at most 8 and a quant at most 6, so only the whole product may need
rounding, once and whatever the order. What is left is at most one subtraction of two exact numbers: a compiler that fuses it into a
multiply-add changes no bit.

Values lie in planes: a run of bytes holds `planes` runs of values, one at each shift. Planes are scaled first and stacked last. Stacked
first they would be one loop whose every element finds its plane and unpacks its scale anew: two to eight times slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

Fields = dict[str, Array]


def q2_k(fields: Fields) -> Array:
    """Decode Q2_K: 16 sub-blocks of 16 values, w = d * scale * q - dmin * min."""
    q = _blocks(fields["q"], 2, 32)
    planes = [q >> 2 * j & 3 for j in range(4)]
    scales = _blocks(fields["scales"], 16)
    return _join(planes, _product(fields["d"], scales & 15), _product(fields["dmin"], scales >> 4))


def q3_k(fields: Fields) -> Array:
    """Decode Q3_K: 16 sub-blocks of 16 values, w = d * scale * q with q in -4..3; a clear bit in `high` means minus 4."""
    q, high = _blocks(fields["q"], 2, 32), _blocks(fields["high"], 1, 32)
    group = lax.broadcasted_iota(jnp.uint8, q.shape, q.ndim - 2)
    planes = [((q >> 2 * j & 3) | (high >> 4 * group + j & 1) << 2).astype(jnp.int8) - 4 for j in range(4)]
    packed = _blocks(fields["scales"], 12)
    low, top = packed[..., :8], packed[..., 8:]
    scales = jnp.concatenate([low & 15, low >> 4], -1) | jnp.concatenate([top >> 2 * j & 3 for j in range(4)], -1) << 4
    return _join(planes, _product(fields["d"], scales.astype(jnp.int8) - 32))


def q4_k(fields: Fields) -> Array:
    """Decode Q4_K: 8 sub-blocks of 32 values, w = d * scale * q - dmin * min."""
    q = _blocks(fields["q"], 4, 32)
    return _join([q & 15, q >> 4], *_scaled(fields))


def q5_k(fields: Fields) -> Array:
    """Decode Q5_K: Q4_K with a fifth bit of each value in `high`."""
    q, high = _blocks(fields["q"], 4, 32), _blocks(fields["high"], 1, 32)
    group = lax.broadcasted_iota(jnp.uint8, q.shape, q.ndim - 2)
    planes = [(q >> 4 * j & 15) | (high >> 2 * group + j & 1) << 4 for j in range(2)]
    return _join(planes, *_scaled(fields))


def q6_k(fields: Fields) -> Array:
    """Decode Q6_K: 16 sub-blocks of 16 values, w = d * scale * q with q in -32..31."""
    q, high = _blocks(fields["q"], 2, 64), _blocks(fields["high"], 2, 32)
    sides = q[..., :32], q[..., 32:]
    planes = [((sides[j % 2] >> 4 * (j // 2) & 15) | (high >> 2 * j & 3) << 4).astype(jnp.int8) - 32 for j in range(4)]
    return _join(planes, _product(fields["d"], _blocks(fields["scales"], 16)))


def _blocks(a: Array, *sizes: int) -> Array:
    """Split the last axis into blocks of the given sizes: [..., n * prod(sizes)] -> [..., n, *sizes]."""
    return a.reshape(*a.shape[:-1], -1, *sizes)


def _product(d: Array, scales: Array) -> Array:
    """Scale the scales: f16 [..., n] and integers [..., n, sub-blocks] -> f32 [..., n, sub-blocks]."""
    return d.astype(jnp.float32)[..., None] * scales.astype(jnp.float32)


def _scaled(fields: Fields) -> tuple[Array, Array]:
    """Compute d * scale and dmin * min of Q4_K and Q5_K: two of f32 [..., n, 8]."""
    scales, mins = scales_and_mins(fields["scales"])
    return _product(fields["d"], scales), _product(fields["dmin"], mins)


def scales_and_mins(packed: Array) -> tuple[Array, Array]:
    """Unpack the 6-bit scales and mins of Q4_K and Q5_K: two of uint8 [..., n, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 mins 0-3; the two upper bits belong to scales and mins 4-7, the rest of these is in bytes 8-11.
    """
    packed = _blocks(packed, 3, 4)
    scale, least, rest = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = jnp.concatenate([scale & 63, rest & 15 | scale >> 6 << 4], -1)
    mins = jnp.concatenate([least & 63, rest >> 4 | least >> 6 << 4], -1)
    return scales, mins


def _join(planes: Sequence[Array], scales: Array, mins: Array | None = None) -> Array:
    """Scale every plane and put the planes side by side.

    planes: integers [..., n, groups, run]; scales, mins: f32 [..., n, sub-blocks] in the order of the values, which is group, plane, run.
    Returns f32 [..., n * 256].
    """
    *n, groups, _ = planes[0].shape
    by_plane = (*n, groups, len(planes), -1, 1)
    scales = scales.reshape(by_plane)
    joined = []
    for j, q in enumerate(planes):
        scale = scales[..., j, :, :]
        values = scale * q.astype(jnp.float32).reshape(*scale.shape[:-1], -1)
        joined.append(values if mins is None else values - mins.reshape(by_plane)[..., j, :, :])
    return jnp.stack(joined, -3).reshape(*n[:-1], -1)
