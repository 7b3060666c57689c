"""Weights by columns, for CPUs: [N, K] of a file, turned around once to [K, N] when it is loaded.

For a product by [N, K] a library turns all of the weights around first, in every step, or adds in another order when there is one row. By
columns neither is needed: entries of the result lie side by side, and each gets its terms one after the other in the order of K, every
product and its sum rounded at once. So a row's bits do not depend on how many rows there are (see `sums`), while each number of rows is
multiplied in the way that is fast for it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from ds4jax.model.quant.layouts import COLUMNS, layout_of
from ds4jax.model.quant.qtensor import QTensor

BLOCK = 32  # terms between two visits of the result; also what shares a scale
OUTPUTS = 64  # a library adds in another order where N is no multiple of it
INPUTS = range(64, 513, BLOCK)  # of fewer the compiler sees all terms at once, and rounds them otherwise; of more a library cuts K
TILE_VALUES = 1 << 15  # weights that are multiplied at a time by few rows: of more a library would cut K
MANY_ROWS = 128  # from here all weights are multiplied at once


def suits_columns(kind: str, n: int, k: int) -> bool:
    """Tell whether a weight [..., n, k] of a GGUF type can lie by columns and gains from it."""
    return kind in COLUMNS and n >= OUTPUTS and k in INPUTS


def to_columns(w: QTensor) -> QTensor:
    """Turn a weight around, on the host or on the device: the same bytes, fields [..., N, K/b] -> [..., K/b, N]."""
    return QTensor(COLUMNS[w.kind], jax.tree.map(lambda a: a.swapaxes(-1, -2), w.fields))


def take_outputs(w: QTensor, first: int, n: int) -> QTensor:
    """Cut a weight to outputs first .. first + n - 1."""
    axis = -1 if layout_of(w.kind).by_columns else -2
    return jax.tree.map(lambda a: lax.slice_in_dim(a, first, first + n, axis=axis), w)


def decode_columns(fields: dict[str, Array]) -> Array:
    """Decode the fields of a weight by columns: f32 [..., K, N]."""
    if "w" in fields:
        return fields["w"].astype(jnp.float32)
    d, q = fields["d"].astype(jnp.float32), fields["q"]
    *leading, k, n = q.shape
    blocks = q.reshape(*leading, k // BLOCK, BLOCK, n).astype(jnp.float32)
    return (d[..., None, :] * blocks).reshape(q.shape)


def multiply_columns(x: Array, w: QTensor) -> Array:
    """Multiply x [M, K] by w [N, K], which lies by columns: f32 [M, N]."""
    if x.shape[0] == 1:
        return _multiply_one(x[0], w.fields)[None]
    values = decode_columns(w.fields).astype(x.dtype)  # [K, N]
    k, n = values.shape
    tile = TILE_VALUES // k // OUTPUTS * OUTPUTS
    is_whole = n <= tile or x.shape[0] >= MANY_ROWS
    values = jnp.pad(values, ((0, 0), (0, -n % (OUTPUTS if is_whole else tile))))
    if is_whole:
        return _dot(x, values)[:, :n]
    tiles = values.reshape(k, -1, tile).swapaxes(0, 1)
    y = _dot(jnp.broadcast_to(x, (tiles.shape[0], *x.shape)), tiles)  # [tiles, M, tile]
    return y.swapaxes(0, 1).reshape(x.shape[0], -1)[:, :n]


def _dot(x: Array, values: Array) -> Array:
    return jnp.matmul(x, values, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _multiply_one(x: Array, fields: dict[str, Array]) -> Array:
    """Multiply x [K]: f32 [N]. Weights are decoded on the way into the sum and are nowhere written down."""
    n_block = x.shape[0] // BLOCK
    n = next(iter(fields.values())).shape[1]

    def add_block(i: Array, y: Array) -> Array:
        block = {name: lax.dynamic_slice_in_dim(a, i * (a.shape[0] // n_block), a.shape[0] // n_block) for name, a in fields.items()}
        terms, values = lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK).astype(jnp.float32), decode_columns(block).astype(x.dtype)
        for j in range(BLOCK):
            y = y + terms[j] * values[j].astype(jnp.float32)
        return y

    return lax.fori_loop(0, n_block, add_block, jnp.zeros(n, jnp.float32))
