"""Snapshots and forks of a slot: which bits go where, and that continuing from one gives the bits of a cold run."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.config import FLASH
from ds4jax.model.cache import KVCache, export_slot
from ds4jax.model.snapshot import COPIED_TOKENS, Snapshots, init_snapshots, restore, save
from ds4jax.serving.engine.memory import plan_memory
from ds4jax.serving.engine.programs import Shapes, lower
from tests.model.test_steps import SMALL, SPEC, digest, random_cache

FORMATS = [("none", "bfloat16"), ("ds4", "float32")]
N_CTX = 2 * COPIED_TOKENS + 300  # not a whole number of turns


def at(cache: KVCache, slot: int, position: int) -> KVCache:
    """A slot that stands at a position."""
    return KVCache(**{**cache.__dict__, "position": cache.position.at[slot].set(position)})


def kept(cache: KVCache, kv_quant: str, dtype: str, slot: int) -> Snapshots:
    return jax.jit(save)(cache, init_snapshots(SMALL, 3, kv_quant, dtype), jnp.int32(slot), jnp.int32(1))


def back_to(cache: KVCache, snapshots: Snapshots, source: int, target: int) -> KVCache:
    return jax.jit(restore)(cache, snapshots, jnp.int32(1), jnp.int32(source), jnp.int32(target))


def rows_of(cache: KVCache, slot: int, n_token: int) -> list[bytes]:
    """The compressed rows of a slot's first tokens."""
    kinds = ((cache.comp4, 4), (cache.comp128, 128), (cache.index, 4))
    return [np.asarray(part[:, slot, : n_token // ratio]).tobytes() for rows, ratio in kinds for part in rows.parts.values()]


def small_of(cache: KVCache, slot: int) -> list[bytes]:
    """The state that every token overwrites."""
    one = export_slot(cache, slot)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((one.position, one.raw, one.win4, one.win128, one.win_index))]


@pytest.mark.parametrize(("kv_quant", "dtype"), FORMATS)
def test_a_rewind_brings_back_the_small_state_and_touches_nothing_else(kv_quant: str, dtype: str) -> None:
    then, now = at(random_cache(kv_quant, dtype, N_CTX), 1, 77), random_cache(kv_quant, dtype, N_CTX, seed=1)
    back = back_to(now, kept(then, kv_quant, dtype, 1), 1, 1)
    assert small_of(back, 1) == small_of(then, 1) and back.position[1] == 77
    assert rows_of(back, 1, N_CTX) == rows_of(now, 1, N_CTX)
    assert back.next_token[1] == now.next_token[1]
    assert [digest(back, s) for s in (0, 2)] == [digest(now, s) for s in (0, 2)]


@pytest.mark.parametrize(("kv_quant", "dtype"), FORMATS)
def test_a_fork_copies_the_rows_of_its_tokens_and_no_more(kv_quant: str, dtype: str) -> None:
    cache = random_cache(kv_quant, dtype, N_CTX)
    for position in (1, 127, 1024, 1025, N_CTX):
        check_fork(at(cache, 2, position), kv_quant, dtype, position)


def check_fork(cache: KVCache, kv_quant: str, dtype: str, position: int) -> None:
    fork = back_to(cache, kept(cache, kv_quant, dtype, 2), 2, 0)
    assert small_of(fork, 0) == small_of(cache, 2)
    assert rows_of(fork, 0, position) == rows_of(cache, 2, position)
    for name, ratio in (("comp4", 4), ("comp128", 128), ("index", 4)):
        for part, before in zip(getattr(fork, name).parts.values(), getattr(cache, name).parts.values(), strict=True):
            behind = slice(position // ratio, None)
            assert np.asarray(part[:, 0, behind]).tobytes() == np.asarray(before[:, 0, behind]).tobytes()
    assert [digest(fork, s) for s in (1, 2)] == [digest(cache, s) for s in (1, 2)]


def test_what_a_broken_source_holds_behind_is_not_copied() -> None:
    cache = at(random_cache("none", "bfloat16", N_CTX), 2, 600)
    comp4 = cache.comp4.parts["x"].at[:, 2, 150:].set(jnp.nan)
    cache = KVCache(**{**cache.__dict__, "comp4": type(cache.comp4)({"x": comp4}, cache.comp4.format, cache.comp4.n_rot)})
    fork = back_to(cache, kept(cache, "none", "bfloat16", 2), 2, 0)
    assert not np.isnan(np.asarray(fork.comp4.parts["x"][:, 0], np.float32)).any()


@pytest.mark.parametrize("kind", ["save", "restore"])
def test_neither_way_copies_what_it_does_not_change(kind: str) -> None:
    """The pool, or the cache, is updated in place, and no scratch has the size of a slot's capacity."""
    few, many = (lower(Shapes(SPEC, 2, n_ctx, (), (), 4), (kind, 0)).compile().memory_analysis() for n_ctx in (1 << 13, 1 << 17))
    assert few.temp_size_in_bytes == many.temp_size_in_bytes < few.alias_size_in_bytes
    changed, grown = many.alias_size_in_bytes, many.argument_size_in_bytes - few.argument_size_in_bytes
    assert (changed - few.alias_size_in_bytes) == (grown if kind == "restore" else 0)
    assert many.output_size_in_bytes - changed < 4096, "something comes out that is no part of it"


def test_the_plan_counts_the_pool() -> None:
    none, some = (plan_memory(SPEC, 2, 256, available_bytes=1 << 30, n_snapshot=n) for n in (0, 8))
    assert none.snapshot_bytes == 0 and some.snapshot_bytes == 8 * plan_memory(SPEC, 2, 256, n_snapshot=1).snapshot_bytes
    assert some.total_bytes == none.total_bytes + some.snapshot_bytes and some.most_slots < none.most_slots


def test_bytes_of_a_snapshot_of_flash() -> None:
    """It must stay small beside a slot: 43 rings of 128 rows, and the unfinished windows of 41 layers in float32."""
    shapes = jax.eval_shape(partial(init_snapshots, FLASH, 1, "ds4", "bfloat16"))
    n_byte = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    assert n_byte == 43 * 128 * 583 + 8 * (21 * 8 * (1024 + 256) + 20 * 128 * 512) + 4
