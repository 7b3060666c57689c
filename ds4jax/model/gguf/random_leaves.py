"""Fill a model's leaves with random weights, without a file: the shapes and formats of ds4's files, made on the device.

A file of the full shape takes long to write and to read; for measuring speed its layout matters and its numbers do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.config import ModelConfig
from ds4jax.model.gguf.layout import TensorSpec, ds4_tensors
from ds4jax.model.gguf.random_blocks import random_blocks
from ds4jax.model.quant import PREPARED, QTensor, arrange, pack
from ds4jax.model.spec import FlatModel, ModelSpec, build, describe

_POOL_ROWS = 512  # distinct rows of a matrix or a table; each of its rows is one of them
_ON_DEVICE_BYTES = 16 << 20  # larger fields are put together on the device; for smaller ones compiling that would take longer
_PLAIN = {"F32": np.float32, "F16": np.float16}


def random_spec(config: ModelConfig, quant: str, kv_quant: str, dtype: str) -> ModelSpec:
    """Describe a model of a shape as ds4's files hold it. Raises ConfigError for an unknown quant or kv_quant."""
    return describe(config, [(tensor.name, tensor.kind) for tensor in ds4_tensors(config, quant)], kv_quant, dtype)


def random_leaves(spec: ModelSpec, quant: str, seed: int = 0) -> FlatModel:
    """Make every weight of a model on the device.

    Args:
        quant: the one that `spec` was made for.

    Rows are drawn from a pool of valid ones, so blocks decode to what a file's would, but rows recur.
    """
    return FlatModel.of(build(spec, _RandomSource(spec.config, quant, seed)))


class _RandomSource:
    """Gives random leaves; see `weights.Source`."""

    def __init__(self, config: ModelConfig, quant: str, seed: int) -> None:
        self._tensors = {tensor.name: tensor for tensor in ds4_tensors(config, quant)}
        self._n_expert = config.n_expert
        self._rng = np.random.default_rng(seed)

    def kind(self, name: str) -> str:
        """Return a tensor's type."""
        return self._tensors[name].kind

    def matrix(
        self, layers: Sequence[Sequence[str]], rows: Sequence[int], shape: tuple[int, ...], *, stacked: bool, prepared: str | None
    ) -> Any:
        """Return a QTensor on the device."""
        tensor = self._tensors[layers[0][0]]
        full = (len(layers), *shape) if stacked else shape
        pool_shape = (_POOL_ROWS, full[-1])
        if tensor.kind in _PLAIN:
            raw = self._normal(tensor, pool_shape).astype(_PLAIN[tensor.kind]).view(np.uint8)
        else:
            raw = random_blocks(self._rng, tensor.kind, pool_shape, tensor.std)
        pool = QTensor(tensor.kind, pack(tensor.kind, raw, pool_shape))
        to = prepared or tensor.kind
        if to in PREPARED.values():  # rows are prepared each by itself, so the pool stands for them
            pool = jax.tree.map(np.asarray, arrange(jax.tree.map(jnp.asarray, pool), to))
        picks = self._rows(full[:-1])
        return arrange(QTensor(pool.kind, {name: _spread(field, picks) for name, field in pool.fields.items()}), to)

    def array(self, names: Sequence[str], shape: tuple[int, ...], dtype: str, *, stacked: bool) -> Any:
        """Return an array on the device; of an int32 table each row holds distinct experts."""
        full = (len(names), *shape) if stacked else shape
        if dtype == "int32":
            experts = self._rng.random((_POOL_ROWS, self._n_expert)).argsort(axis=1)[:, : full[-1]]
            return _spread(experts.astype(np.int32), self._rows(full[:-1]))
        return jnp.asarray(self._normal(self._tensors[names[0]], full).astype(dtype))

    def _normal(self, tensor: TensorSpec, shape: tuple[int, ...]) -> np.ndarray:
        """Draw plain values; those around 1 (norms, scales) stay clear of 0."""
        values = self._rng.standard_normal(shape, np.float32) * np.float32(tensor.std) + np.float32(tensor.mean)
        return np.maximum(values, 0.25) if tensor.mean else values

    def _rows(self, shape: tuple[int, ...]) -> np.ndarray:
        """Choose rows of the pool, for a short matrix all different: experts whose router rows are equal would always come together."""
        *outer, n = shape
        if n > _POOL_ROWS:
            return self._rng.integers(0, _POOL_ROWS, shape, np.int32)
        return self._rng.random((*outer, _POOL_ROWS), np.float32).argsort(axis=-1)[..., :n].astype(np.int32)


def _spread(pool: np.ndarray, rows: np.ndarray) -> jax.Array:
    """Gather rows of a pool [P, ...] into [*rows.shape, ...]."""
    large = rows.size * pool[0].nbytes > _ON_DEVICE_BYTES
    return jnp.asarray(pool)[rows] if large else jnp.asarray(pool[rows])
