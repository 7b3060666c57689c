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
from ds4jax.model.quant import QTensor, field_shapes, pack
from ds4jax.model.spec import FlatModel, ModelSpec, build

_POOL_ROWS = 512  # distinct rows of a quantised matrix; each of its rows is one of them
_PLAIN = ("F32", "F16")


def random_spec(config: ModelConfig, quant: str, kv_quant: str, dtype: str) -> ModelSpec:
    """Describe a model of a shape as ds4's files hold it. Raises ConfigError for an unknown quant or kv_quant."""
    return ModelSpec(config, tuple((tensor.name, tensor.kind) for tensor in ds4_tensors(config, quant)), kv_quant, dtype)


def random_leaves(spec: ModelSpec, quant: str, seed: int = 0) -> FlatModel:
    """Make every weight of a model on the device.

    Args:
        quant: the one that `spec` was made for.

    Quantised rows are drawn from a pool of valid ones, so blocks decode to what a file's would, but rows recur.
    """
    return FlatModel.of(build(spec, _RandomSource(spec.config, quant, seed)))


class _RandomSource:
    """Gives random leaves; see `weights.Source`."""

    def __init__(self, config: ModelConfig, quant: str, seed: int) -> None:
        self._tensors = {tensor.name: tensor for tensor in ds4_tensors(config, quant)}
        self._n_expert = config.n_expert
        self._rng = np.random.default_rng(seed)
        self._key = jax.random.key(seed)

    def matrix(self, names: Sequence[str], shape: tuple[int, ...], *, stacked: bool) -> Any:
        """Return a QTensor on the device."""
        tensor = self._tensors[names[0]]
        full = (len(names), *shape) if stacked else shape
        if tensor.kind in _PLAIN:
            return QTensor(
                tensor.kind, {name: self._normal(tensor, s.shape, s.dtype) for name, s in field_shapes(tensor.kind, full).items()}
            )
        pool_shape = (_POOL_ROWS, full[-1])
        pool = pack(tensor.kind, random_blocks(self._rng, tensor.kind, pool_shape, tensor.std), pool_shape)
        row = jax.random.randint(self._next_key(), full[:-1], 0, _POOL_ROWS)
        return QTensor(tensor.kind, {name: jnp.asarray(field)[row] for name, field in pool.items()})

    def array(self, names: Sequence[str], shape: tuple[int, ...], dtype: str, *, stacked: bool) -> Any:
        """Return an array on the device; of an int32 table each row holds distinct experts."""
        full = (len(names), *shape) if stacked else shape
        if dtype == "int32":
            order = jax.random.uniform(self._next_key(), (*full[:-1], self._n_expert)).argsort(axis=-1)
            return order[..., : full[-1]].astype(jnp.int32)
        return self._normal(self._tensors[names[0]], full, jnp.dtype(dtype))

    def _normal(self, tensor: TensorSpec, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Draw plain values; those around 1 (norms, scales) stay clear of 0."""
        values = (jax.random.normal(self._next_key(), shape, jnp.float32) * tensor.std + tensor.mean).astype(dtype)
        return jnp.maximum(values, jnp.asarray(0.25, dtype)) if tensor.mean else values

    def _next_key(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return key
