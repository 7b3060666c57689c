"""Shapes of synthetic models, and the small model that commands use when none is named."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ds4jax.cli.vocabulary import read_vocabulary, train_small_vocabulary
from ds4jax.config import FLASH, PRO, ModelConfig
from ds4jax.errors import ConfigError
from ds4jax.model.gguf.vocabulary import Vocabulary, placeholder_vocabulary

# Every kind of layer in a few megabytes: without compression, ratios 4 and 128, experts by token id and by score.
TINY = replace(
    FLASH, name="ds4jax tiny", n_layer=5, n_embd=256, n_vocab=640, n_head=4, head_dim=96, n_rot=32, q_lora_rank=64, o_lora_rank=64,
    n_out_group=2, n_window=64, compress_ratios=(0, 0, 4, 128, 4), n_index_head=8, index_top_k=32, n_expert=6, n_expert_used=2, n_ff=256,
    swiglu_clamp=(10.0,) * 5, swiglu_clamp_shared=(10.0,) * 5,
)  # fmt: skip

PRESETS = {"tiny": TINY, "flash": FLASH, "pro": PRO}


def shape_of(preset: str, n_layer: int | None = None) -> ModelConfig:
    """Return a preset's shape, cut to its first n_layer layers if asked.

    Raises ConfigError for a preset that does not exist or a layer count it does not reach.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset: got {preset!r}, expected one of {', '.join(PRESETS)}")
    config = PRESETS[preset]
    if n_layer is None:
        return config
    if not 1 <= n_layer <= config.n_layer:
        raise ConfigError(f"--layers: got {n_layer}, expected 1 to {config.n_layer} for {preset}")
    return replace(
        config,
        n_layer=n_layer,
        compress_ratios=config.compress_ratios[:n_layer],
        swiglu_clamp=config.swiglu_clamp[:n_layer],
        swiglu_clamp_shared=config.swiglu_clamp_shared[:n_layer],
    )


def vocabulary_of(config: ModelConfig, tokenizer_json: Path | None) -> Vocabulary:
    """Choose the vocabulary: the file's if one is named, a learnt one for small sizes, else placeholders."""
    if tokenizer_json is not None:
        return read_vocabulary(tokenizer_json, config.n_vocab)
    if config.n_vocab == TINY.n_vocab:
        return train_small_vocabulary(config.n_vocab)
    return placeholder_vocabulary(config.n_vocab)


def default_model() -> Path:
    """Return the path of the small model, written on first use below $XDG_CACHE_HOME (or ~/.cache).

    Its weights are random, so it answers at once on any machine, with nonsense.
    """
    from ds4jax.model.gguf.writer import write_synthetic

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "ds4jax" / "tiny-q8-1.gguf"  # the number changes when the file's content does
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic(path, TINY, "q8", seed=0, vocabulary=vocabulary_of(TINY, None))
    return path
