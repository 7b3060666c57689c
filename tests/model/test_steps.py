"""What holds for the two step functions by their structure: they change no module, and cost nothing for unused context."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ds4jax.cli.presets import TINY
from ds4jax.model.cache import KVCache, clear_slot, copy_slot, export_slot, import_slot, init_cache
from ds4jax.model.gguf.layout import ds4_tensors
from ds4jax.model.spec import ModelSpec, abstract_model
from ds4jax.model.steps import DecodeBatch, PrefillBatch, decode_step, prefill_chunk
from ds4jax.serving.engine.programs import Shapes, lower

SMALL = replace(TINY, n_layer=2, compress_ratios=(4, 128), index_top_k=4, swiglu_clamp=(10.0,) * 2, swiglu_clamp_shared=(10.0,) * 2)
SPEC = ModelSpec(SMALL, tuple((t.name, t.kind) for t in ds4_tensors(SMALL, "q8")), "none", "float32")


def test_a_step_changes_no_attribute_of_the_model() -> None:
    flat = abstract_model(SPEC)
    n = jax.ShapeDtypeStruct((2,), jnp.int32)
    chunk = PrefillBatch(jax.ShapeDtypeStruct((2, 8), jnp.int32), n, n)  # type: ignore[arg-type]

    def both(leaves: tuple[jax.Array, ...], cache: KVCache, chunk: PrefillBatch, rows: DecodeBatch) -> KVCache:
        model = flat.merge(leaves)
        graph, state = nnx.split(model)
        cache = decode_step(model, prefill_chunk(model, cache, chunk, jnp.dtype("float32"))[1], rows, jnp.dtype("float32"))[1]
        after_graph, after = nnx.split(model)
        assert after_graph == graph
        assert all(a is b for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True))
        return cache

    cache = jax.eval_shape(lambda: init_cache(SMALL, 4, 64, "none", "float32"))
    out = jax.eval_shape(both, flat.leaves, cache, chunk, DecodeBatch(n, n))  # type: ignore[arg-type]
    assert jax.tree.map(lambda a: (a.shape, a.dtype), out) == jax.tree.map(lambda a: (a.shape, a.dtype), cache)


def test_scratch_of_a_decode_step_does_not_grow_with_the_context() -> None:
    """Nothing in the program but the cache itself may have the size of a slot's capacity: reads go tile by tile, as far as rows live."""
    small, large = (lower(Shapes(SPEC, 2, n_ctx, (2,), ()), ("decode", 2)).compile().memory_analysis() for n_ctx in (1 << 13, 1 << 18))
    growth = large.argument_size_in_bytes - small.argument_size_in_bytes
    assert growth > 4 * small.temp_size_in_bytes
    assert large.temp_size_in_bytes <= 1.01 * small.temp_size_in_bytes
    assert large.alias_size_in_bytes - small.alias_size_in_bytes == growth, "the cache is copied, not updated in place"


# ---------------------------------------------------------------- slots of a cache
FORMATS = [("none", "float32"), ("none", "bfloat16"), ("ds4", "float32")]


def random_cache(kv_quant: str, dtype: str, n_ctx: int = 128, seed: int = 0) -> KVCache:
    """A cache whose every value differs from its neighbours'."""
    rng = np.random.default_rng(seed)

    def fill(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.integers(-120, 120, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(fill, init_cache(SMALL, 3, n_ctx, kv_quant, dtype))


def digest(cache: KVCache, slot: int) -> int:
    """Hash the bits of a slot."""
    return hash(tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(export_slot(cache, slot))))


@pytest.mark.smoke
@pytest.mark.parametrize(("kv_quant", "dtype"), FORMATS)
def test_copies_exports_and_imports_are_bit_exact(kv_quant: str, dtype: str) -> None:
    cache = random_cache(kv_quant, dtype)
    before = [digest(cache, s) for s in range(3)]
    copied = copy_slot(cache, 2, 0)
    assert [digest(copied, s) for s in range(3)] == [before[2], before[1], before[2]]
    moved = import_slot(cache, export_slot(cache, 0), 1)
    assert [digest(moved, s) for s in range(3)] == [before[0], before[0], before[2]]


@pytest.mark.smoke
@pytest.mark.parametrize(("kv_quant", "dtype"), FORMATS)
def test_a_cleared_slot_has_the_bits_of_a_new_one(kv_quant: str, dtype: str) -> None:
    cache = random_cache(kv_quant, dtype)
    cleared = clear_slot(cache, 1)
    assert digest(cleared, 1) == digest(init_cache(SMALL, 3, 128, kv_quant, dtype), 1)
    assert [digest(cleared, s) for s in (0, 2)] == [digest(cache, s) for s in (0, 2)]
