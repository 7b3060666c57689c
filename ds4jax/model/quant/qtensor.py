"""QTensor: a packed weight as a pytree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ds4jax.errors import ModelFileError
from ds4jax.model.quant.layouts import Part, layout_of, tile_of


@partial(jax.tree_util.register_dataclass, data_fields=["fields", "first"], meta_fields=["kind", "matrix"])
@dataclass(frozen=True)
class QTensor:
    """A weight [..., N, K] that stays packed as in its GGUF file.

    kind: GGUF type name; fields: arrays [..., N, K / values a block * elements a block], named in `layouts`. All fields share the leading
    axes (layers, experts, rows), so that stacking and indexing these is a `jax.tree.map`.

    Of weights by columns the last two axes are tiles, each of K / values a block * elements a block, and rows of a tile. Zeros fill up the
    last tile, so `matrix` says (N, K); and where fields hold many matrices behind each other, `first` says with which tile this one begins.
    """

    kind: str
    fields: dict[str, Any] = field(repr=False)  # arrays, or their shapes before there are any
    matrix: tuple[int, int] | None = None
    first: Array | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., N, K]."""
        layout = layout_of(self.kind)
        name, part = next(iter(layout.parts.items()))
        *leading, n, width = self.fields[name].shape
        if self.matrix is not None:
            return (*leading, *self.matrix)
        return (*leading, n, width // part.count * layout.values)

    @property
    def tiles(self) -> tuple[int, int]:
        """Of weights by columns: how many tiles a matrix has, and how many rows a tile."""
        tile = next(iter(self.fields.values())).shape[-1]
        return -(-self.shape[-2] // tile), tile

    @property
    def nbytes(self) -> int:
        """Bytes of all fields: those of the tensor in its file, and of zeros that fill up tiles."""
        return sum(math.prod(a.shape) * a.dtype.itemsize for a in self.fields.values())


def abstract(kind: str, shape: Sequence[int]) -> QTensor:
    """Describe a weight [..., N, K] before any array exists. Raises as `field_shapes` does."""
    *_, n, k = shape
    return QTensor(kind, field_shapes(kind, shape), (n, k) if layout_of(kind).by_columns else None)


def field_shapes(kind: str, shape: Sequence[int]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the fields of a weight [..., N, K], before any array exists.

    Raises ModelFileError where K is no whole number of blocks.
    """
    layout = layout_of(kind)
    *leading, n, k = shape
    n_blocks = _n_blocks(kind, k)

    def field_shape(part: Part) -> tuple[int, ...]:
        width = n_blocks * part.count
        if not layout.by_columns:
            return (*leading, n, width)
        tile = tile_of(n, k)
        return (*leading, -(-n // tile) * width, tile)

    return {name: jax.ShapeDtypeStruct(field_shape(part), part.dtype) for name, part in layout.parts.items()}


def row_bytes(kind: str, k: int) -> int:
    """Bytes of one row of k values. Raises ModelFileError where k is no whole number of blocks."""
    return _n_blocks(kind, k) * layout_of(kind).block.itemsize


def pack(kind: str, raw: np.ndarray, shape: Sequence[int]) -> dict[str, np.ndarray]:
    """Split a tensor's bytes into fields, on the host.

    raw: uint8 of any shape whose size fits, C order, possibly a read-only memory map; shape: logical [..., N, K]. Plain float kinds are
    views of `raw`; of the others each field is one copy. Raises ModelFileError where bytes and shape disagree.
    """
    layout = layout_of(kind)
    *leading, k = shape
    n_bytes = math.prod(leading) * row_bytes(kind, k)
    if raw.dtype != np.uint8 or raw.size != n_bytes:
        raise ModelFileError(
            f"{kind} tensor of shape {tuple(shape)}: got {raw.size} x {raw.dtype}, expected {n_bytes} bytes. Is the file whole?"
        )
    blocks = raw.reshape(*leading, -1).view(layout.block)  # [..., N, blocks]
    fields = {}
    for name, part in layout.parts.items():
        values: Any = blocks
        for member in part.path:
            values = values[member]
        fields[name] = np.ascontiguousarray(values).reshape(*leading, -1)
    return fields


def unpack(kind: str, raw: Array, shape: Sequence[int]) -> dict[str, Array]:
    """Split a tensor's bytes into fields, on the device: as `pack`, for raw uint8 [..., N, row bytes] that is there already."""
    layout = layout_of(kind)
    *leading, _ = shape
    members = _unpack(raw.reshape(*leading, -1, layout.block.itemsize), layout.block)
    return {name: a.reshape(*leading, -1) for name, a in members.items()}


def _unpack(raw: Array, block: np.dtype) -> dict[str, Array]:
    """Split blocks uint8 [..., block bytes] into members [..., elements]."""
    members: dict[str, Array] = {}
    for name, (dtype, offset, *_) in (block.fields or {}).items():
        base = dtype.base
        part = raw[..., offset : offset + dtype.itemsize].reshape(*raw.shape[:-1], -1, base.itemsize)
        if base.names:
            members |= _unpack(part, base)
        else:
            members[name] = jax.lax.bitcast_convert_type(part if base.itemsize > 1 else part[..., 0], base)
    return members


def take_layer(w: QTensor, i: Array | int) -> QTensor:
    """Index axis 0 of every field; `i` may be traced and must be in range. A matrix by columns is not copied."""
    if w.matrix is not None and len(w.shape) == 3 and w.first is None:
        fields = {name: a.reshape(-1, a.shape[-1]) for name, a in w.fields.items()}
        return replace(w, fields=fields, first=jnp.asarray(i, jnp.int32) * w.tiles[0])
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False), w)


def _n_blocks(kind: str, k: int) -> int:
    values = layout_of(kind).values
    if k % values:
        raise ModelFileError(
            f"{kind}: rows of {k} values, expected a multiple of {values}. Such a tensor must be stored as F16, F32 or Q8_0."
        )
    return k // values
