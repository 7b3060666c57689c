"""Other shapes than the oracle's: random models of every odd kind, against the NumPy reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds4jax.cli.presets import TINY
from ds4jax.cli.vocabulary import learn_vocabulary
from ds4jax.config import ModelConfig
from ds4jax.model.gguf.writer import write_synthetic
from ds4jax.model.model import load_model
from tests.model.oracle import SMOOTH, TOLERANCE, AllLogits
from tests.model.reference import Reference

CHUNK = 48


def shape(ratios: tuple[int, ...], *, clamp: float = 10.0, clamp_shared: float = 10.0, **fields: Any) -> ModelConfig:
    """Make a small shape with the given ratios; other fields as named."""
    n = len(ratios)
    small = dict(
        n_embd=64, n_vocab=320, n_head=4, head_dim=48, n_rot=16, q_lora_rank=32, o_lora_rank=32, index_dim=32, n_ff=64, n_window=16
    )
    common = dict(name="odd", n_layer=n, compress_ratios=ratios, swiglu_clamp=(clamp,) * n, swiglu_clamp_shared=(clamp_shared,) * n)
    return replace(TINY, **(small | common | fields))


# name -> shape, tokens to feed. Each differs from the oracle's sets in something that they all share.
SHAPES: dict[str, tuple[ModelConfig, int]] = {
    "pro's schedule": (shape((128, 128, 4), n_hash_layer=1, n_expert=7, n_expert_used=3, index_top_k=5, expert_scale=2.5), 290),
    "no compression, two streams": (shape((0, 0), n_hc=2, n_hash_layer=0, head_dim=32, n_rot=32, n_expert=4, n_expert_used=4), 70),
    "only the indexer": (shape((4, 4, 4), n_hc=2, n_hash_layer=2, n_index_head=3, index_top_k=3, n_window=5, hc_sinkhorn_iters=3), 120),
    "clamps that bite, separate epsilons": (
        shape((4, 128), clamp=1.5, clamp_shared=0.4, rms_eps=1e-2, hc_eps=3e-2, n_hash_layer=0, index_top_k=1000, n_head=6, n_out_group=3),
        200,
    ),
    "a window wider than the prompt, short YaRN": (
        shape((4, 0, 4, 0), n_window=300, yarn_original_ctx=64, rope_base_compressed=500.0, n_hash_layer=0, n_expert_used=1),
        100,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, AllLogits]]:
    """Write, load and compile every shape, on all cores."""
    folder = tmp_path_factory.mktemp("shapes")

    def make(item: tuple[int, str]) -> tuple[Path, AllLogits]:
        seed, name = item
        config, n_token = SHAPES[name]
        path = folder / f"{seed}.gguf"
        write_synthetic(path, config, "q8", seed, learn_vocabulary(config.n_vocab, config.n_vocab))
        return path, AllLogits(load_model(path, kv_quant="none", dtype="float32"), CHUNK, n_token + 4)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SHAPES, pool.map(make, enumerate(SHAPES)), strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_agrees_with_the_reference(models: dict[str, tuple[Path, AllLogits]], name: str) -> None:
    path, logits = models[name]
    config, n_token = SHAPES[name]
    tokens = np.random.default_rng(7).integers(0, config.n_vocab, n_token)
    sizes = [1, 3, *([CHUNK] * ((n_token - 4) // CHUNK)), (n_token - 4) % CHUNK]
    got = logits(tokens.tolist(), [s for s in sizes if s])
    want = Reference(path).logits(tokens)
    assert want.std() > 0.5
    assert np.abs(got - want).max() <= TOLERANCE


def test_the_reference_agrees_with_the_oracle() -> None:
    run = SMOOTH.run(130)
    assert np.abs(Reference(SMOOTH.path).logits(run.tokens)[run.positions] - run.logits).max() <= TOLERANCE
