"""Shapes and vocabularies of synthetic models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ds4jax.cli.vocabulary import learn_vocabulary, read_tokenizer_json
from ds4jax.config import FLASH, PRO, ModelConfig
from ds4jax.errors import ConfigError
from ds4jax.text.vocabulary import Vocabulary

# Every kind of layer in a few megabytes: without compression, ratios 4 and 128, experts by token id and by score.
TINY = replace(
    FLASH, name="ds4jax tiny", n_layer=6, n_embd=256, n_vocab=640, n_head=4, head_dim=96, n_rot=32, q_lora_rank=64, o_lora_rank=64,
    n_out_group=2, n_window=64, compress_ratios=(0, 0, 4, 128, 4, 128), n_hash_layer=2, n_index_head=8,
    index_top_k=32, n_expert=6, n_expert_used=2, n_ff=256,
    swiglu_clamp=(10.0,) * 6, swiglu_clamp_shared=(10.0,) * 6,
)  # fmt: skip

PRESETS = {"tiny": TINY, "flash": FLASH, "pro": PRO}


def shape_of(preset: str, n_layer: int | None = None) -> ModelConfig:
    """Return a preset's shape, cut to its first n_layer layers if asked.

    Raises ConfigError for a preset that does not exist or a layer count it does not reach.
    """
    if preset not in PRESETS:
        raise ConfigError(f"--preset: got {preset!r}, expected one of {', '.join(PRESETS)}")
    config = PRESETS[preset]
    if n_layer is None:
        return config
    if not 1 <= n_layer <= config.n_layer:
        raise ConfigError(f"--layers: got {n_layer}, expected 1 to {config.n_layer} for {preset}")
    if n_layer == config.n_layer:
        return config
    return replace(
        config,
        name=f"{config.name}, first {n_layer} layers",  # a file with the published name must have the published shape
        n_layer=n_layer,
        compress_ratios=config.compress_ratios[:n_layer],
        swiglu_clamp=config.swiglu_clamp[:n_layer],
        swiglu_clamp_shared=config.swiglu_clamp_shared[:n_layer],
    )


def vocabulary_of(config: ModelConfig, tokenizer_json: Path | None = None) -> Vocabulary:
    """Choose the vocabulary for a shape: the file's if one is named, else a learnt one, filled up with placeholders."""
    if tokenizer_json is not None:
        return read_tokenizer_json(tokenizer_json, config.n_vocab)
    return learn_vocabulary(config.n_vocab)
