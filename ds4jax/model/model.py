"""A loaded model: weights on the device, tokenizer, and logits for those who want to look inside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from ds4jax import config as configs
from ds4jax.config import ModelConfig
from ds4jax.errors import ModelFileError, RequestError
from ds4jax.model.cache import KVCache, init_cache
from ds4jax.model.gguf.digest import weights_digest
from ds4jax.model.gguf.load import Progress, load_leaves
from ds4jax.model.gguf.reader import GGUFFile
from ds4jax.model.spec import FlatModel, ModelSpec, describe
from ds4jax.model.steps import PrefillBatch, prefill_all_logits
from ds4jax.text.tokenizer import Tokenizer

LOGITS_CHUNK = 256  # tokens at a time when logits are wanted for every token


class Model:
    """Weights, shape and vocabulary of one GGUF file, ready to compute.

    spec: what its programs depend on. flat: its leaves, in spec order. digest: tells its weights from all others.
    """

    def __init__(self, spec: ModelSpec, flat: FlatModel, tokenizer: Tokenizer, digest: str = "") -> None:
        self.spec, self.flat, self.tokenizer, self.digest = spec, flat, tokenizer, digest
        self._forward = jax.jit(partial(_all_logits, flat, spec), donate_argnums=1)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.spec.config

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the device."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.flat.leaves)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Compute the logits after every token of one sequence.

        Args:
            tokens: T ids, each in [0, n_vocab), T >= 1.

        Returns:
            NumPy float32 [T, V]; row t predicts token t + 1.

        Raises:
            RequestError: no tokens, or an id outside the vocabulary.
        """
        ids = check_tokens(tokens, self.config.n_vocab)
        chunk = min(LOGITS_CHUNK, _power_of_two(len(ids)))
        cache = init_cache(self.config, 1, max(1024, _power_of_two(len(ids))), self.spec.kv_quant, self.spec.dtype)
        slot = np.zeros(1, np.int32)
        out = []
        for first in range(0, len(ids), chunk):
            piece = ids[first : first + chunk]
            padded = np.zeros((1, chunk), np.int32)
            padded[0, : len(piece)] = piece
            logits, cache = self._forward(self.flat.leaves, cache, PrefillBatch(padded, slot, np.full(1, len(piece), np.int32)))  # type: ignore[arg-type]
            out.append(np.asarray(logits[0, : len(piece)]))
        return np.concatenate(out)


def _all_logits(
    flat: FlatModel, spec: ModelSpec, leaves: Sequence[jax.Array], cache: KVCache, batch: PrefillBatch
) -> tuple[jax.Array, KVCache]:
    return prefill_all_logits(flat.merge(leaves), cache, batch, spec.compute)


def check_tokens(tokens: Sequence[int], n_vocab: int) -> np.ndarray:
    """Return token ids as int32 [T]. Raises RequestError for none, or one outside [0, n_vocab)."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0:
        raise RequestError(f"tokens: got an array of shape {ids.shape}, expected a flat list of at least one id")
    if not np.issubdtype(ids.dtype, np.integer):
        raise RequestError(f"tokens: got {ids.dtype}, expected whole numbers")
    outside = ids[(ids < 0) | (ids >= n_vocab)]
    if outside.size:
        raise RequestError(f"tokens: id {int(outside[0])} is outside the vocabulary of {n_vocab}")
    return ids.astype(np.int32)


def _power_of_two(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def read_spec(file: GGUFFile, kv_quant: str, dtype: str) -> ModelSpec:
    """Describe a file's model; files that call themselves Flash or Pro must have exactly that shape."""
    config = file.config
    for published in (configs.FLASH, configs.PRO):
        if config.name.lower().replace("-", " ") == published.name.lower():
            configs.check_published_shape(config, published)
    return describe(config, file.kinds, kv_quant, dtype)


def load_model(path: str | Path, kv_quant: str = "ds4", dtype: str | None = None, progress: Progress | None = None) -> Model:
    """Load a DeepSeek V4 GGUF file onto the device.

    Args:
        path: the file.
        kv_quant: "ds4" keeps cache rows in FP8 and FP4 as the model was trained (what to use with real weights);
            "none" is plain arithmetic, as transformers computes.
        dtype: "float32" or "bfloat16", the type of matrix products' operands. None: bfloat16 on a GPU, float32 on a CPU.
        progress: called after each tensor with bytes done, bytes in all, and its name.

    Raises:
        ModelFileError, ConfigError, BindingError, TokenizerError: the file cannot be used; the message says why.
    """
    file = GGUFFile(path)
    if "tokenizer.ggml.tokens" not in file.metadata:
        raise ModelFileError(f"{path}: the file carries no vocabulary (tokenizer.ggml.tokens)")
    spec = read_spec(file, kv_quant, dtype or default_dtype())
    tokenizer = Tokenizer.from_metadata(file.metadata)
    return Model(spec, load_leaves(file, spec, progress), tokenizer, weights_digest(file))


def default_dtype() -> str:
    """Return the type to compute in on this machine's device."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
