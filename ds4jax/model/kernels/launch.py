"""Launch a Pallas kernel through Triton, or interpret it where there is no GPU.

Kernels see whole arrays and cut them themselves: a layer's weights lie inside the stack of all layers, and a slice of it
passed to a kernel would be a copy. So the layer's index is an operand, read inside.

The Triton backend of Pallas is deprecated in the newest jax in favour of Mosaic GPU; everything of it that the project
uses goes through this file or is imported from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def interpreted() -> bool:
    """Whether kernels run in Python's stead: anywhere but on a GPU. Slow, and bit by bit the same program otherwise."""
    return jax.default_backend() != "gpu"


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    out: Any,
    operands: Sequence[jax.Array],
    *,
    name: str,
    warps: int = 4,
    stages: int = 1,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """Run kernel(*operand refs, *output refs) at every point of a grid.

    Args:
        grid: programs along up to three axes; the first runs fastest.
        out: ShapeDtypeStruct, or a sequence of them.
        aliases: operand number -> output number that shares its buffer (state that a kernel updates in place).

    Returns:
        The outputs, in the structure of `out`.
    """

    def whole(a: Any) -> pl.BlockSpec:
        origin = (0,) * len(a.shape)
        return pl.BlockSpec(a.shape, lambda *_: origin)

    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=out,
        in_specs=[whole(a) for a in operands],
        out_specs=jax.tree.map(whole, out),
        input_output_aliases=dict(aliases or {}),
        interpret=interpreted(),
        compiler_params=None if interpreted() else triton.CompilerParams(num_warps=warps, num_stages=stages),
        name=name,
    )(*operands)


def assembly(code: str, operands: Sequence[jax.Array], meaning: Callable[..., jax.Array]) -> jax.Array:
    """Apply one PTX instruction to int32 tiles of equal shape; `meaning` is the same in jnp, for where there is no GPU."""
    if interpreted():
        return meaning(*operands)
    registers = ",".join(["=r"] + ["r"] * len(operands))
    shape = jax.ShapeDtypeStruct(operands[0].shape, jnp.int32)
    return triton.elementwise_inline_asm(code, args=list(operands), constraints=registers, pack=1, result_shape_dtypes=[shape])[0]


def dot4(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Add the products of four signed bytes to c, elementwise on int32 words: c + sum of a.byte * b.byte."""

    def meaning(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return c + sum(((a << 24 - 8 * k) >> 24) * ((b << 24 - 8 * k) >> 24) for k in range(4))

    return assembly("dp4a.s32.s32 $0, $1, $2, $3;", [a, b, c], meaning)
