"""Steps and chunks on kernels against the same on plain array code, over the boundaries of windows and of the indexer's choice."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.config import FLASH
from ds4jax.model import fused, moe
from ds4jax.model.cache import export_slot, init_cache
from ds4jax.model.gguf.random_leaves import random_leaves, random_spec
from ds4jax.model.kernels import flash, hyper
from ds4jax.model.quant.kernels import grouped
from ds4jax.model.spec import AbstractSource, abstract_model, build
from ds4jax.model.steps import DecodeBatch, PrefillBatch, decode_step, prefill_chunk
from tests.model.lowering import lower_for_cuda

# Flash in small: every kind of layer, sizes that the kernels take, and few enough chosen rows that the indexer has to choose. Experts go
# by token: where two score nearly the same, the paths may choose differently, and random weights then have little in common.
SMALL = replace(
    FLASH, name="small", n_layer=3, n_embd=256, n_vocab=256, n_head=16, head_dim=128, q_lora_rank=128, o_lora_rank=128, n_out_group=2,
    n_window=64, compress_ratios=(0, 4, 128), n_hash_layer=3, n_index_head=16, index_top_k=16, n_expert=16, n_expert_used=2,
    n_ff=256, swiglu_clamp=(10.0,) * 3, swiglu_clamp_shared=(10.0,) * 3,
)  # fmt: skip
SLOTS, CTX, CHUNK = 3, 512, 32


@partial(jax.jit, static_argnums=0)
def run(spec: Any, leaves: Any, cache: Any, batch: Any) -> Any:
    step = decode_step if isinstance(batch, DecodeBatch) else prefill_chunk
    return step(abstract_model(spec).merge(leaves), cache, batch, jnp.bfloat16)


NOBODY = (SLOTS, 0)


def chunk(rng: np.random.Generator, *rows: tuple[int, int]) -> PrefillBatch:
    """Random tokens for rows, each a slot and a number of tokens."""
    slot, n = np.int32(rows).T
    return PrefillBatch(rng.integers(0, 256, (len(rows), CHUNK)).astype(np.int32), slot, n)  # type: ignore[arg-type]


def test_it_is_known_before_which_models_the_kernels_take() -> None:
    def takes(config: Any, quant: str = "q2", **kinds: str) -> bool:
        spec = replace(random_spec(config, quant, "ds4", "bfloat16"), kernels=True)
        return fused.fits(build(spec, AbstractSource(dict(spec.kinds) | {name.replace("__", "."): kind for name, kind in kinds.items()})))

    assert takes(SMALL) and takes(FLASH) and takes(FLASH, "q4")
    assert not takes(SMALL, "q8")  # experts that are not repacked
    assert not takes(replace(SMALL, n_head=24))
    assert not takes(replace(SMALL, n_ff=768))
    assert not takes(SMALL, blk__2__attn_q_b__weight="Q4_0")
    assert not takes(SMALL, blk__1__ffn_up_exps__weight="Q4_K")  # gate and up differ


@pytest.mark.slow
def test_steps_on_kernels_are_those_of_the_plain_path() -> None:
    plain = random_spec(SMALL, "q2", "ds4", "bfloat16")
    specs = [replace(plain, kernels=kernels) for kernels in (False, True)]
    leaves = [random_leaves(spec, "q2").leaves for spec in specs]

    rng = np.random.default_rng(0)
    cache = init_cache(SMALL, SLOTS, CTX, "ds4", "bfloat16")
    # A window of 128 closes at the second step, and the indexer chooses 16 of 30 rows.
    for rows in [((0, 32), (2, 32))] * 2 + [((0, 32), NOBODY), ((0, 30), NOBODY)]:
        cache = run(specs[False], leaves[False], cache, chunk(rng, *rows))[1]
    caches, errors = [cache, cache], []
    for _ in range(4):
        batch = DecodeBatch(rng.integers(0, 256, 4).astype(np.int32), np.int32([2, SLOTS, 0, SLOTS]))
        logits = []
        for kernels in (False, True):
            y, caches[kernels] = run(specs[kernels], leaves[kernels], caches[kernels], batch)
            logits.append(np.asarray(y)[[0, 2]])
        errors += [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(*logits, strict=True)]
    # Both round activations, the kernels to int8 before experts; now and then the indexer takes another of two nearly equal rows.
    assert np.median(errors) < 0.03 and np.mean(np.array(errors) < 0.06) >= 0.75, errors


@pytest.mark.slow
def test_chunks_on_kernels_are_those_of_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = grouped.Tiles(*[grouped.Tile(rows=64, groups=8, warps=4, stages=1, joined=joined) for joined in (4, 2)])
    for module, constants in (
        (grouped, {"FEW": tiles, "MANY": tiles}),
        (flash, {"TILE": flash.Tile(16, 4, 1)}),
        (moe, {"GROUPED_FROM": CHUNK}),
        (hyper, {"MANY": CHUNK}),
    ):
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
    plain = random_spec(SMALL, "q2", "ds4", "bfloat16")
    specs = [replace(plain, kernels=kernels) for kernels in (False, True)]
    leaves = [random_leaves(spec, "q2").leaves for spec in specs]
    rng = np.random.default_rng(0)
    caches = [init_cache(SMALL, SLOTS, CTX, "ds4", "bfloat16")] * 2
    untouched = jax.tree.leaves(export_slot(caches[0], 1))
    errors = []
    # Past what the indexer takes whole, and a window of 128.
    for rows in (((0, 32), (2, 31)), (NOBODY, (0, 32)), ((0, 30), NOBODY), ((2, 20), (0, 32)), ((0, 32), NOBODY)):
        batch, logits = chunk(rng, *rows), []
        for kernels in (False, True):
            y, caches[kernels] = run(specs[kernels], leaves[kernels], caches[kernels], batch)
            logits.append(np.asarray(y)[[row != NOBODY for row in rows]])
        errors += [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(*logits, strict=True)]
    assert np.median(errors) < 0.03 and max(errors[:2]) < 0.03, errors  # as above; both round activations to bfloat16, in other places
    for name in ("raw", "comp4", "comp128"):
        a, b = (getattr(cache, name).read(0, np.int32([0]), np.int32([0])) for cache in caches)
        assert np.linalg.norm(a - b) < 0.06 * np.linalg.norm(a), name
    for before, after in zip(untouched, jax.tree.leaves(export_slot(caches[True], 1)), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_chunk_of_several_prompts_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(random_spec(SMALL, "q2", "ds4", "bfloat16"), kernels=True)
    flat = abstract_model(spec)

    def step(leaves: Any, cache: Any, batch: PrefillBatch) -> Any:
        return prefill_chunk(flat.merge(leaves), cache, batch, jnp.dtype("bfloat16"))

    cache = jax.eval_shape(partial(init_cache, SMALL, 16, 4096, "ds4", "bfloat16"))
    number = jax.ShapeDtypeStruct((16,), jnp.int32)
    batch = PrefillBatch(jax.ShapeDtypeStruct((16, 128), jnp.int32), number, number)  # type: ignore[arg-type]
    assert "flash" in lower_for_cuda(monkeypatch, step, tuple(flat.leaves), cache, batch)
