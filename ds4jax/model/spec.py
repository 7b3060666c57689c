"""Shapes before arrays: the abstract model that loading, memory planning and precompiling share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.config import ModelConfig
from ds4jax.errors import ConfigError
from ds4jax.model import fused
from ds4jax.model.quant import abstract
from ds4jax.model.rounding import FP8_BLOCK, HADAMARD_WIDTH
from ds4jax.model.transformer import Transformer
from ds4jax.model.weights import Take, plan_stacks

KV_QUANTS = ("none", "ds4")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ModelSpec:
    """All that decides a model's programs: its shape, the type of every tensor, and the arithmetic.

    kinds: (tensor name, GGUF type) pairs. kv_quant: "none" or "ds4" (FP8 rows, FP4 indexer). dtype: of matrix products.
    kernels: whether steps run on kernels for a GPU, whose experts have a layout of their own. columns: whether matrices lie by columns, as
    a CPU multiplies faster.
    """

    config: ModelConfig
    kinds: tuple[tuple[str, str], ...]
    kv_quant: str
    dtype: str
    kernels: bool = False
    columns: bool = False

    def __post_init__(self) -> None:
        if self.kv_quant not in KV_QUANTS:
            raise ConfigError(f"kv_quant: got {self.kv_quant!r}, expected one of {KV_QUANTS}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: got {self.dtype!r}, expected one of {DTYPES}")
        plain = self.config.head_dim - self.config.n_rot
        if self.kv_quant == "ds4" and not fits_ds4_rows(self.config):
            raise ConfigError(
                f"kv_quant='ds4' stores rows in blocks of {FP8_BLOCK}, but this model has {plain} plain channels and "
                f"an indexer of {self.config.index_dim}; load it with kv_quant='none'"
            )

    @property
    def compute(self) -> jnp.dtype:
        """Type of matrix products' operands."""
        return jnp.dtype(self.dtype)


def describe(config: ModelConfig, kinds: Sequence[tuple[str, str]], kv_quant: str, dtype: str) -> ModelSpec:
    """Describe a model for this machine's device.

    With kernels where there is a GPU, the type is bfloat16, and they take its shape; by columns where there is only a CPU and the type is
    float32.
    """
    spec = ModelSpec(config, tuple(kinds), kv_quant, dtype)
    if dtype == "float32" and jax.default_backend() == "cpu":
        return replace(spec, columns=True)
    if dtype != "bfloat16" or jax.default_backend() != "gpu":
        return spec
    with_kernels = replace(spec, kernels=True)
    return with_kernels if fused.fits(build(with_kernels, AbstractSource(dict(kinds)))) else spec


def fits_ds4_rows(config: ModelConfig) -> bool:
    """Whether rows of this shape can be stored in ds4's formats."""
    plain = config.head_dim - config.n_rot
    return plain % FP8_BLOCK == 0 and config.index_dim == HADAMARD_WIDTH


class AbstractSource:
    """Gives every leaf as a shape; records which tensors were asked for."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.kinds = kinds
        self.asked: list[str] = []

    def kind(self, name: str) -> str:
        """Return a tensor's type (F32 where the file lacks the tensor: the binding reports it)."""
        return self.kinds.get(name, "F32")

    def matrix(
        self, layers: Sequence[Sequence[str]], rows: Sequence[int], shape: tuple[int, ...], *, stacked: bool, prepared: str | None
    ) -> Any:
        """Return a QTensor of ShapeDtypeStructs."""
        self.asked += [name for names in layers for name in names]
        kind = prepared or self.kind(layers[0][0])
        return abstract(kind, (len(layers), *shape) if stacked else shape)

    def array(self, names: Sequence[str], shape: tuple[int, ...], dtype: str, *, stacked: bool) -> Any:
        """Return a ShapeDtypeStruct."""
        self.asked += names
        return jax.ShapeDtypeStruct((len(names), *shape) if stacked else shape, jnp.dtype(dtype))


def build(spec: ModelSpec, source: Any) -> Transformer:
    """Build the model with weights from a source (abstract, or a file)."""
    take = Take(source, plan_stacks(spec.config, dict(spec.kinds)), spec.kernels, columns=spec.columns)
    return Transformer(spec.config, take, spec.kv_quant)


@dataclass(frozen=True)
class FlatModel:
    """A model taken apart for dispatch: the graph closes over programs, the leaves are their arguments.

    Splitting once and passing a flat list costs a tenth of a millisecond a step where passing modules costs tens.
    """

    graph: Any
    tree: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, model: Transformer) -> FlatModel:
        """Take a model apart."""
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        return cls(graph, tree, tuple(leaves))

    def merge(self, leaves: Sequence[Any]) -> Transformer:
        """Put a model together from leaves in this order (inside a traced function)."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


def abstract_model(spec: ModelSpec) -> FlatModel:
    """Return the model with shapes for leaves; nothing of a file's payload is read."""
    return FlatModel.of(build(spec, AbstractSource(dict(spec.kinds))))
