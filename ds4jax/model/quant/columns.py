"""Weights by columns, for CPUs: [N, K] of a file, turned around once to tiles [K, tile] when it is loaded.

For a product by [N, K] a library turns all of the weights around first, in every step, or adds in another order when there is one row. By
columns neither is needed: entries of the result lie side by side, and each gets its terms one after the other in the order of K, every
product and its sum rounded at once. So a row's bits do not depend on how many rows there are (see `sums`), while each number of rows is
multiplied in the way that is fast for it. In tiles, for few rows read all weights and do little with them: a tile is decoded, multiplied
and forgotten before it leaves the cache.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from ds4jax.model.quant.layouts import COLUMNS, OUTPUTS, layout_of, tile_of
from ds4jax.model.quant.qtensor import QTensor

BLOCK = 32  # terms that share a scale
INPUTS = range(64, 513, BLOCK)  # of fewer the compiler sees all terms at once, and rounds them otherwise; of more a library cuts K
MANY_ROWS = 128  # from here all weights are multiplied at once


def suits_columns(kind: str, n: int, k: int) -> bool:
    """Tell whether a weight [..., n, k] of a GGUF type can lie by columns and gains from it."""
    return kind in COLUMNS and n >= OUTPUTS and k in INPUTS


def to_columns(w: QTensor) -> QTensor:
    """Turn a weight around: the same bytes and zeros behind them, fields [..., N, K/b] -> [..., tiles * K/b, tile]."""
    *_, n, k = w.shape
    tile = tile_of(n, k)

    def turned(a: Array) -> Array:
        filled = jnp.pad(a, (*((0, 0),) * (a.ndim - 2), (0, -n % tile), (0, 0)))
        tiles = filled.reshape(*a.shape[:-2], -1, tile, a.shape[-1]).swapaxes(-1, -2)
        return tiles.reshape(*a.shape[:-2], -1, tile)

    return QTensor(COLUMNS[w.kind], jax.tree.map(turned, w.fields), (n, k))


def from_columns(w: QTensor) -> Array:
    """Decode a weight that lies by columns: f32 [..., N, K]."""
    n_tile, tile = w.tiles
    *leading, n, k = w.shape
    values = _decode(w.fields if w.first is None else _take_tiles(w, 0, n_tile))
    return values.reshape(*leading, n_tile, k, tile).swapaxes(-1, -2).reshape(*leading, -1, k)[..., :n, :]


def take_outputs(w: QTensor, first: int, n: int) -> tuple[QTensor, int]:
    """Cut a matrix to outputs first .. first + n - 1, and others that lie with them: returns how many come before, too."""
    if w.matrix is None:
        return jax.tree.map(lambda a: lax.slice_in_dim(a, first, first + n, axis=-2), w), 0
    _, tile = w.tiles
    begin, end = first // tile, -(-(first + n) // tile)
    before = jnp.int32(0) if w.first is None else w.first
    return replace(w, matrix=((end - begin) * tile, w.matrix[1]), first=before + begin), first - begin * tile


def multiply_columns(x: Array, w: QTensor) -> Array:
    """Multiply x [M, K] by w [N, K], which lies by columns: f32 [M, N]."""
    if len(x) == 1:  # a library adds in another order for one row
        return multiply_columns(jnp.concatenate([x, x]), w)[:1]
    (n_tile, tile), (n, k) = w.tiles, w.shape
    if n_tile == 1:
        return _dot(x, _decode(_take_tiles(w, 0, 1)))[:, :n]
    if len(x) >= MANY_ROWS:
        values = _decode(_take_tiles(w, 0, n_tile)).reshape(n_tile, k, tile).swapaxes(0, 1)
        return _dot(x, values.reshape(k, -1))[:, :n]

    def multiply_tile(i: Array, y: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(y, _dot(x, _decode(_take_tiles(w, i, 1))), i * tile, axis=1)

    return lax.fori_loop(0, n_tile, multiply_tile, jnp.zeros((len(x), n_tile * tile), jnp.float32))[:, :n]


def _take_tiles(w: QTensor, i: Array | int, n: int) -> dict[str, Array]:
    """Cut fields to n tiles of a matrix, from its tile i on."""
    layout = layout_of(w.kind)
    at = i if w.first is None else w.first + i

    def cut(name: str) -> Array:
        width = w.shape[-1] // layout.values * layout.parts[name].count
        return lax.dynamic_slice_in_dim(w.fields[name], at * width, n * width)

    return {name: cut(name) for name in w.fields}


def _dot(x: Array, values: Array) -> Array:
    return jnp.matmul(x, values.astype(x.dtype), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _decode(fields: dict[str, Array]) -> Array:
    """Decode fields [..., K/b, tile]: f32 [..., K, tile]; tiles may follow each other."""
    if "w" in fields:
        return fields["w"].astype(jnp.float32)
    d, q = fields["d"].astype(jnp.float32), fields["q"]
    *leading, k, n = q.shape
    blocks = q.reshape(*leading, k // BLOCK, BLOCK, n).astype(jnp.float32)
    return (d[..., None, :] * blocks).reshape(q.shape)
