"""A slot on its way between the device and a file: its live rows in pieces of a bounded size, and the small rest in one.

In a file, compressed rows stand in the order of their positions, [row, L, ...], so that pieces follow one another and a file says nothing
of how many tokens its slot could hold. Pieces are cut where positions are multiples of PIECE_TOKENS. The device's programs move whole
pieces, for shapes are fixed; how much of one is live is the host's business.

`export_rows` of pieces 0, 1, ... and `export_state` at one position are all there is of a session. Rows may be exported later than the
state, for as long as the slot's first tokens stay the same: they are written once each (see `snapshot`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.model.cache import KVCache, Rows, Window

PIECE_TOKENS = 1024  # 3.5 MB of Flash: a transfer that no decode step notices
_ROWS = {"comp4": 4, "comp128": 128, "index": 4}
_STATE = ("raw", "win4", "win128", "win_index")

Arrays = Mapping[str, Any]


def n_pieces(n_tokens: int) -> int:
    """Count the pieces of a session's rows."""
    return -(-n_tokens // PIECE_TOKENS)


# ---------------------------------------------------------------- on the device
def export_state(cache: KVCache, slot: jax.Array) -> dict[str, jax.Array]:
    """Return all of a slot (int32 scalar in range) but its compressed rows: [L, ...] by name."""
    return {name: jax.lax.dynamic_index_in_dim(a, slot, 1, keepdims=False) for name, a in _named(cache, _STATE)}


def export_rows(cache: KVCache, slot: jax.Array, piece: jax.Array) -> dict[str, jax.Array]:
    """Return the rows of one piece (int32 scalar) as they lie in a file, [row, L, ...] by name. At the end of a slot some come again."""
    out = {}
    for name, a in _named(cache, _ROWS):
        n, first = _extent(a.shape[2], _ratio(name), piece)
        start = (0, slot, first, *(0,) * (a.ndim - 3))
        rows = jax.lax.dynamic_slice(a, start, (a.shape[0], 1, n, *a.shape[3:]))
        out[name] = jnp.swapaxes(rows[:, 0], 0, 1)
    return out


def import_state(cache: KVCache, slot: jax.Array, state: Arrays, position: jax.Array) -> KVCache:
    """Put an exported state into a slot, which stands at `position` (int32 scalar) from then on."""
    new = {name: jax.lax.dynamic_update_slice_in_dim(a, state[name][:, None], slot, 1) for name, a in _named(cache, _STATE)}
    return dataclasses.replace(_with(cache, _STATE, new), position=cache.position.at[slot].set(position))


def import_rows(cache: KVCache, slot: jax.Array, piece: jax.Array, rows: Arrays) -> KVCache:
    """Put the rows of one piece, as `rows_of_piece` cuts them, into a slot."""
    new = {}
    for name, a in _named(cache, _ROWS):
        _, first = _extent(a.shape[2], _ratio(name), piece)
        new[name] = jax.lax.dynamic_update_slice(a, jnp.swapaxes(rows[name], 0, 1)[:, None], (0, slot, first, *(0,) * (a.ndim - 3)))
    return _with(cache, _ROWS, new)


# ---------------------------------------------------------------- on the host
def parts(cache: KVCache, n_tokens: int) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """List the arrays of a session of n_tokens in a file: name, dtype, shape. cache: of any size, shapes suffice."""
    rows = [(name, str(a.dtype), (n_tokens // _ratio(name), a.shape[0], *a.shape[3:])) for name, a in _named(cache, _ROWS)]
    state = [(name, str(a.dtype), (a.shape[0], *a.shape[2:])) for name, a in _named(cache, _STATE)]
    return (*rows, *state)


def live_rows(exported: Mapping[str, np.ndarray], n_row: Mapping[str, int], piece: int, n_tokens: int) -> dict[str, np.ndarray]:
    """Cut from an exported piece what belongs to it and to the first n_tokens. n_row: rows that a slot holds, by name."""
    out = {}
    for name, rows in exported.items():
        ratio = _ratio(name)
        low, high = (min(n, n_tokens // ratio) for n in (piece * (PIECE_TOKENS // ratio), (piece + 1) * (PIECE_TOKENS // ratio)))
        _, first = _extent(n_row[name], ratio, piece)
        out[name] = rows[low - int(first) : high - int(first)]
    return out


def rows_of_piece(arrays: Mapping[str, np.ndarray], n_row: Mapping[str, int], piece: int) -> dict[str, np.ndarray]:
    """Cut one piece for `import_rows` from the arrays of a whole session, with zeros behind its end."""
    out = {}
    for name, most in n_row.items():
        n, first = _extent(most, _ratio(name), piece)
        rows = arrays[name][int(first) : int(first) + n]
        missing = ((0, n - len(rows)), *((0, 0),) * (rows.ndim - 1))
        out[name] = np.pad(rows, missing) if len(rows) < n else rows
    return out


def row_capacities(cache: KVCache) -> dict[str, int]:
    """Return how many rows of each kind a slot holds, by name."""
    return {name: a.shape[2] for name, a in _named(cache, _ROWS)}


# ---------------------------------------------------------------- names
def _ratio(name: str) -> int:
    return _ROWS[name.partition(".")[0]]


def _extent(n_row: int, ratio: int, piece: Any) -> tuple[int, Any]:
    """Return the rows of a piece, and the first one: at the end of a slot it begins earlier, so as to fit."""
    n = min(PIECE_TOKENS // ratio, n_row)
    least = min if isinstance(piece, int) else jnp.minimum
    return n, least(piece * n, n_row - n)


def _named(cache: KVCache, fields: Sequence[str] | Mapping[str, int]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of some fields by name, such as raw.code and win4.u."""
    for field in fields:
        value: Rows | Window = getattr(cache, field)
        arrays = value.parts if isinstance(value, Rows) else {"u": value.u, "z": value.z}
        yield from ((f"{field}.{name}", arrays[name]) for name in sorted(arrays))


def _with(cache: KVCache, fields: Sequence[str] | Mapping[str, int], new: Arrays) -> KVCache:
    changed: dict[str, Any] = {}
    for field in fields:
        value: Rows | Window = getattr(cache, field)
        mine = {name.partition(".")[2]: a for name, a in new.items() if name.startswith(f"{field}.")}
        changed[field] = dataclasses.replace(value, parts=mine) if isinstance(value, Rows) else dataclasses.replace(value, **mine)
    return dataclasses.replace(cache, **changed)
