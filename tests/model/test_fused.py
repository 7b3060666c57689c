"""A decode step on kernels against the same step on plain array code, over the boundaries of windows and of the indexer's choice."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.config import FLASH
from ds4jax.model import fused
from ds4jax.model.cache import init_cache
from ds4jax.model.gguf.random_leaves import random_leaves, random_spec
from ds4jax.model.steps import DecodeBatch, PrefillBatch, decode_step, prefill_chunk

# Flash in small: every kind of layer, sizes that the kernels take, and few enough chosen rows that the indexer has to choose.
SMALL = replace(
    FLASH, name="small", n_layer=5, n_embd=256, n_vocab=256, n_head=16, head_dim=128, q_lora_rank=128, o_lora_rank=128, n_out_group=2,
    n_window=64, compress_ratios=(0, 4, 128, 4, 128), n_hash_layer=1, n_index_head=16, index_top_k=16, n_expert=4, n_expert_used=2,
    n_ff=256, swiglu_clamp=(10.0,) * 5, swiglu_clamp_shared=(10.0,) * 5,
)  # fmt: skip
SLOTS, CTX = 3, 512


def test_steps_on_kernels_are_those_of_the_plain_path() -> None:
    plain = random_spec(SMALL, "q2", "ds4", "bfloat16")
    assert fused.fits(SMALL, dict(plain.kinds))
    specs = [replace(plain, kernels=kernels) for kernels in (False, True)]
    models = [random_leaves(spec, "q2") for spec in specs]

    @partial(jax.jit, static_argnums=0)
    def run(kernels: bool, leaves: Any, cache: Any, batch: Any) -> Any:
        step = decode_step if isinstance(batch, DecodeBatch) else prefill_chunk
        return step(models[kernels].merge(leaves), cache, batch, jnp.bfloat16)

    rng = np.random.default_rng(0)
    cache = init_cache(SMALL, SLOTS, CTX, "ds4", "bfloat16")
    for slot, n in ((0, 126), (2, 61)):  # a window of 128 closes at the second step, and the indexer chooses 16 of 30 rows
        batch = PrefillBatch(rng.integers(0, 256, (1, 128)).astype(np.int32), np.int32([slot]), np.int32([n]))
        cache = run(False, models[False].leaves, cache, batch)[1]
    caches, errors = [cache, cache], []
    for _ in range(4):
        batch = DecodeBatch(rng.integers(0, 256, 4).astype(np.int32), np.int32([2, SLOTS, 0, SLOTS]))
        logits = []
        for kernels in (False, True):
            y, caches[kernels] = run(kernels, models[kernels].leaves, caches[kernels], batch)
            logits.append(np.asarray(y)[[0, 2]])
        errors += [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in zip(*logits, strict=True)]
    # Both round activations, the kernels to int8 before experts: some per cent of random weights' logits. Where two experts or rows
    # score nearly the same, the paths may choose differently, and random weights then have little in common.
    assert np.median(errors) < 0.04 and np.mean(np.array(errors) < 0.08) >= 0.75, errors
