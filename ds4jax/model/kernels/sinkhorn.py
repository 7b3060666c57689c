"""Sinkhorn's normalisations of many small matrices in one launch.

Written as array code, the iterations are about 75 launches that depend on each other, twice a layer: at one row two thirds of all
launches of a step. Here a program keeps its matrices in registers throughout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

BLOCK = 16  # matrices a program


def fits(h: int) -> bool:
    """Whether the kernel takes H x H matrices: its tiles must be powers of two."""
    return h & (h - 1) == 0


def sinkhorn(z: jax.Array, n_iter: int, eps: float, *, interpret: bool = False) -> jax.Array:
    """Compute `hyper.sinkhorn` of z [M, H, H] f32."""
    m, h, _ = z.shape
    block = min(BLOCK, 1 << (m - 1).bit_length())
    padded = jnp.pad(z, ((0, -m % block), (0, 0), (0, 0)))
    spec = pl.BlockSpec((block, h, h), lambda i: (i, 0, 0))
    call = pl.pallas_call(
        partial(_kernel, n_iter=n_iter, eps=eps),
        out_shape=jax.ShapeDtypeStruct(padded.shape, z.dtype),
        grid=(padded.shape[0] // block,),
        in_specs=[spec],
        out_specs=spec,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=1),
        name="sinkhorn",
    )
    return call(padded)[:m]


def _kernel(z_ref: Any, out_ref: Any, *, n_iter: int, eps: float) -> None:
    z = z_ref[...]
    e = jnp.exp(z - jnp.max(z, axis=2, keepdims=True))
    c = e / jnp.sum(e, axis=2, keepdims=True) + eps
    c = c / (jnp.sum(c, axis=1, keepdims=True) + eps)
    for _ in range(n_iter - 1):
        c = c / (jnp.sum(c, axis=2, keepdims=True) + eps)
        c = c / (jnp.sum(c, axis=1, keepdims=True) + eps)
    out_ref[...] = c
