"""Snapshots: what of a slot's state cannot be had back by cutting it, kept for a later return to that position.

Compressed rows are written once each, at an index that follows from the position: those of the first P tokens stay right for as
long as the slot's first P tokens stay the same, whatever is fed behind them. The ring of the last W rows and the unfinished windows
are overwritten by every token. So a snapshot keeps these alone (16 MB for Flash, however long the session), and a slot goes
back to position P by getting them back: its own slot by nothing else (a rewind), another one with a copy of the
compressed rows of the first P tokens (a fork).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ds4jax.config import ModelConfig
from ds4jax.model.cache import KVCache, Rows, Window, init_cache

COPIED_TOKENS = 1024  # of a fork in one turn of its loop: a multiple of both ratios, small enough that short prompts cost little


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Snapshots:
    """A pool of M snapshots; the fields are those of `KVCache`, with M where it has slots. position: int32 [M]."""

    position: jax.Array
    raw: Rows
    win4: Window
    win128: Window
    win_index: Window


def init_snapshots(config: ModelConfig, n_snapshot: int, kv_quant: str, dtype: str) -> Snapshots:
    """Return a pool of snapshots of empty slots. Under jax.eval_shape it gives the shapes alone."""
    return _small(init_cache(config, n_snapshot, 1, kv_quant, dtype))


def save(cache: KVCache, snapshots: Snapshots, slot: jax.Array, entry: jax.Array) -> Snapshots:
    """Keep slot `slot` as it is now in place `entry` of the pool (int32 scalars in range)."""
    return _copy(_small(cache), slot, snapshots, entry)


def restore(cache: KVCache, snapshots: Snapshots, entry: jax.Array, source: jax.Array, target: jax.Array) -> KVCache:
    """Bring slot `target` to where the snapshot `entry` was taken (int32 scalars in range).

    Args:
        source: a slot whose first tokens are those of the snapshot, as many as its position says; it gives the compressed rows. The
            same as target for a rewind, which copies none.

    The rows of the target behind them keep what they held, which nobody sees. It must be finite: masked rows are still multiplied by zero.
    """
    n_token = snapshots.position[entry]
    small = _copy(snapshots, entry, _small(cache), target)
    cache = dataclasses.replace(cache, **{f.name: getattr(small, f.name) for f in dataclasses.fields(small)})
    n_turn = jnp.where(source == target, 0, -(-n_token // COPIED_TOKENS))

    def copy(turn: jax.Array, rows: tuple[Rows, Rows, Rows]) -> tuple[Rows, ...]:
        return tuple(_copy_rows(one, n_token // ratio, source, target, turn, ratio) for one, ratio in zip(rows, (4, 128, 4), strict=True))

    comp4, comp128, index = jax.lax.fori_loop(0, n_turn, copy, (cache.comp4, cache.comp128, cache.index))
    return dataclasses.replace(cache, comp4=comp4, comp128=comp128, index=index)


def _small(cache: KVCache) -> Snapshots:
    return Snapshots(**{f.name: getattr(cache, f.name) for f in dataclasses.fields(Snapshots)})


def _copy(source: Snapshots, i: jax.Array, target: Snapshots, j: jax.Array) -> Snapshots:
    """Return target with place j as place i of source."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        axis = 0 if a.ndim == 1 else 1
        return jax.lax.dynamic_update_slice_in_dim(b, jax.lax.dynamic_slice_in_dim(a, i, 1, axis), j, axis)

    return jax.tree.map(one, source, target)


def _copy_rows(rows: Rows, n_live: jax.Array, source: jax.Array, target: jax.Array, turn: jax.Array, ratio: int) -> Rows:
    """Copy the rows of one turn, of every layer, as far as they are live: beyond, a busy source may hold anything, even NaN."""
    n = min(COPIED_TOKENS // ratio, rows.n_row)
    first = jnp.minimum(turn * n, rows.n_row - n)  # the last turn may copy some rows again
    is_live = first + jnp.arange(n) < n_live

    def one(a: jax.Array) -> jax.Array:
        size = (a.shape[0], 1, n, *a.shape[3:])
        rest = (0,) * (a.ndim - 3)
        new, old = (jax.lax.dynamic_slice(a, (0, slot, first, *rest), size) for slot in (source, target))
        return jax.lax.dynamic_update_slice(a, jnp.where(is_live.reshape(1, 1, n, *(1,) * len(rest)), new, old), (0, target, first, *rest))

    return dataclasses.replace(rows, parts={name: one(a) for name, a in rows.parts.items()})
