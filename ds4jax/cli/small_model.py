"""The model that commands use when none is named, and where it lies."""

from __future__ import annotations

from pathlib import Path

from ds4jax.config import cache_directory
from ds4jax.errors import ConfigError


def default_model() -> Path:
    """Return the path of a small model, written to the cache on first use.

    Its weights are random: it starts at once on any machine and writes nonsense.
    """
    path = cache_directory() / "tiny-q8-v2.gguf"  # the version changes when the file's content does
    if not path.exists():
        from ds4jax.cli.presets import TINY, vocabulary_of
        from ds4jax.model.gguf.writer import write_synthetic

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path.parent}: {error.strerror}; set DS4JAX_CACHE_DIR to a folder that can be written") from error
        write_synthetic(path, TINY, "q8", seed=0, vocabulary=vocabulary_of(TINY))
    return path
