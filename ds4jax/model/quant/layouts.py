"""How each GGUF block type lies in memory, and which arrays a packed tensor is split into.

A block is declared once, as a NumPy structured type: its members, in file order, are the fields of a QTensor. Splitting a tensor into
fields is therefore a pure permutation of its bytes. Quants stay in whole bytes or words, so that kernels can read them in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

from ds4jax.errors import ModelFileError


@dataclass(frozen=True)
class Part:
    """One field of a block.

    path: member names inside the structured block type; dtype: element type on the device; count: elements in a block.
    """

    path: tuple[str, ...]
    dtype: np.dtype
    count: int


@dataclass(frozen=True)
class Layout:
    """A block type: how many values a block holds, its bytes, and its parts by field name.

    by_columns: fields are [..., tiles * K / b, `tile_of`] instead of [..., N, K / b].
    """

    values: int
    block: np.dtype
    parts: Mapping[str, Part]
    by_columns: bool = False


def layout_of(kind: str) -> Layout:
    """Look up a block type by its GGUF name, or a prepared layout by its own. Raises ModelFileError that lists the known ones."""
    if kind in PREPARED_LAYOUTS:
        return PREPARED_LAYOUTS[kind]
    if kind not in LAYOUTS:
        raise ModelFileError(f"tensor type {kind} cannot be used as a weight; known types are {', '.join(LAYOUTS)}. Requantise the file.")
    return LAYOUTS[kind]


def _layout(values: int, members: list[tuple]) -> Layout:
    block = np.dtype(members)
    return Layout(values, block, MappingProxyType(dict(_parts(block))))


def _parts(block: np.dtype, path: tuple[str, ...] = (), repeat: int = 1) -> list[tuple[str, Part]]:
    """List the leaves of a structured type; groups that repeat inside a block contribute all their repetitions."""
    parts = []
    for name in block.names or ():
        base, shape = block[name].base, block[name].shape
        count = repeat * int(np.prod(shape, dtype=int))
        if base.names:
            parts += _parts(base, (*path, name), count)
        else:
            parts.append((name, Part((*path, name), base, count)))
    return parts


def _plain(dtype: np.dtype) -> Layout:
    """Values that are not quantised: blocks of one."""
    return _layout(1, [("w", dtype)])


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "F32": _plain(np.dtype("<f4")),
        "F16": _plain(np.dtype("<f2")),
        "BF16": _plain(np.dtype(jnp.bfloat16)),
        "Q8_0": _layout(32, [("d", "<f2"), ("q", "i1", 32)]),
        "Q4_0": _layout(32, [("d", "<f2"), ("q", "u1", 16)]),
        "Q2_K": _layout(256, [("scales", "u1", 16), ("q", "u1", 64), ("d", "<f2"), ("dmin", "<f2")]),
        "Q3_K": _layout(256, [("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), ("d", "<f2")]),
        "Q4_K": _layout(256, [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)]),
        "Q5_K": _layout(256, [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)]),
        "Q6_K": _layout(256, [("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")]),
        "IQ2_XXS": _layout(256, [("d", "<f2"), ("groups", [("index", "<u4"), ("signs", "<u4")], 8)]),
        "MXFP4": _layout(32, [("exponent", "u1"), ("q", "u1", 16)]),
    }
)

OUTPUTS = 64  # of weights by columns: a library adds in another order where a product has no multiple of so many
_TILE_VALUES = 1 << 15  # decoded they fit into a core's cache; and of more a library would cut K


def tile_of(n: int, k: int) -> int:
    """How many outputs of weights [n, k] by columns lie together: a multiple of OUTPUTS that fills up with few zeros."""
    most = _TILE_VALUES // k // OUTPUTS * OUTPUTS
    n_tile = -(-n // most)
    return -(-n // (n_tile * OUTPUTS)) * OUTPUTS


# GGUF type -> the layout that holds the same weights by columns (`columns`).
COLUMNS: Mapping[str, str] = MappingProxyType({kind: f"{kind}:columns" for kind in ("F32", "F16", "BF16", "Q8_0")})

# Of weights put in order for kernels (`repack`) or turned around (`columns`). They are in no file: the blocks only say how many elements
# of a field 256 values need. Those for kernels have no field with more than one element for 32 values, so that none of a large model's
# has more than 2**31.
PREPARED_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "IQ2_XXS:words": _layout(256, [("code0", "<u4", 8), ("code1", "<u4", 8), ("sign", "<u4", 8), ("scale", "u1", 8), ("d", "<f2")]),
        "Q2_K:words": _layout(
            256, [("q0", "<u4", 8), ("q1", "<u4", 8), ("scales0", "u1", 8), ("scales1", "u1", 8), ("d", "<f2"), ("dmin", "<f2")]
        ),
        "Q4_K:words": _layout(
            256, [*((f"q{i}", "<u4", 8) for i in range(4)), ("scale", "u1", 8), ("least", "u1", 8), ("d", "<f2"), ("dmin", "<f2")]
        ),
        **{to: replace(LAYOUTS[kind], by_columns=True) for kind, to in COLUMNS.items()},
    }
)
