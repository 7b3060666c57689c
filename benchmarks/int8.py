"""Simulate ds4's arithmetic: activations of int8, with one scale for 32 of them, in every product of packed weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp

from ds4jax.model.quant import QTensor

# The package gives its function the same name.
products = importlib.import_module("ds4jax.model.quant.matmul")

GROUP = 32
PLAIN_KINDS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class _Packed:
    """Expanded weights that were packed."""

    weights: jax.Array


@contextmanager
def int8_activations() -> Iterator[None]:
    """Round what meets packed weights, in programs that are traced within: a function that was compiled before stays as it was."""
    dequantize, dot, multiply_columns = products.dequantize, products.dot, products.multiply_columns

    def marked(w: QTensor, dtype: Any = None) -> Any:
        expanded = dequantize(w, dtype)
        return _Packed(expanded) if _is_packed(w) else expanded

    def rounded(x: jax.Array, w: Any, **options: Any) -> jax.Array:
        return dot(to_int8(x), w.weights, **options) if isinstance(w, _Packed) else dot(x, w, **options)

    def by_columns(x: jax.Array, w: QTensor) -> jax.Array:
        return multiply_columns(to_int8(x) if _is_packed(w) else x, w)

    with patch.multiple(products, dequantize=marked, dot=rounded, multiply_columns=by_columns):
        yield


def _is_packed(w: QTensor) -> bool:
    return w.kind.partition(":")[0] not in PLAIN_KINDS  # what follows is how they lie


def to_int8(x: jax.Array) -> jax.Array:
    """Round x [..., K] to what int8 with a scale for every 32 values along K holds of it."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / 127
    return (jnp.round(groups / jnp.where(scale > 0, scale, 1)) * scale).reshape(x.shape)
