"""The trained weights by GGUF name: their beginnings, and our own model built from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.config import ModelConfig
from ds4jax.model.gguf.layout import TensorSpec, ds4_tensors
from ds4jax.model.quant import QTensor
from ds4jax.model.spec import ModelSpec, build
from ds4jax.model.transformer import Transformer

Weights = dict[str, jax.Array]
FIXED = ("ffn_gate_tid2eid.weight", "exp_probs_b.bias")  # not found by gradients: a table, and what balances the experts


def begin_weights(config: ModelConfig, token_counts: np.ndarray, seed: int) -> tuple[Weights, Weights]:
    """Draw the first weights: (trained ones, fixed ones), by GGUF name.

    Args:
        token_counts: how often each token occurs, int [V]; the tables of hash layers spread the load by it.
    """
    rng = np.random.default_rng(seed)
    trained: Weights = {}
    fixed: Weights = {}
    for spec in ds4_tensors(config, "q8"):
        if spec.kind == "I32":
            fixed[spec.name] = jnp.asarray(_spread_tokens(rng, token_counts, config.n_expert, config.n_expert_used))
        elif spec.name.endswith(FIXED):
            fixed[spec.name] = jnp.zeros(spec.shape, jnp.float32)
        else:
            trained[spec.name] = jnp.asarray(_first_values(rng, spec, config), jnp.float32)
    return trained, fixed


def _first_values(rng: np.random.Generator, spec: TensorSpec, config: ModelConfig) -> np.ndarray:
    """Begin as a plain residual network: streams mix little, blocks add little, and each block prefers a stream of its own."""
    layer, _, name = spec.name.removeprefix("blk.").partition(".")
    h = config.n_hc
    if name.startswith("hc_") and name.endswith("_base.weight"):
        own = 2 * int(layer) + name.startswith("hc_ffn")
        favoured = np.where(np.arange(h) == own % h, 1.0, -0.5)
        return np.concatenate([favoured, favoured, 4.0 * np.eye(h).reshape(-1)])
    if spec.name.endswith("_scale.weight"):
        return np.full(spec.shape, 0.5)
    if name == "attn_compressor_ape.weight" and spec.shape[0] == 4:
        # Each pair of channels begins with one token of its own window: a mean of eight tokens would tell little of any.
        channel = np.arange(spec.shape[1] // 2)
        own = np.where(channel // 2 % 4 == np.arange(4)[:, None], 4.0, 0.0)
        return np.concatenate([np.full(own.shape, -2.0), own], axis=1)
    if spec.mean:
        return np.ones(spec.shape)
    if spec.name.endswith(("_base.weight", "_sinks.weight", "_ape.weight")):
        return np.zeros(spec.shape)
    std = spec.shape[-1] ** -0.5
    if name.startswith(("attn_output_b", "ffn_down")):
        std /= (2 * config.n_layer) ** 0.5
    if spec.name in ("output.weight", "output_hc_fn.weight") or name.startswith(("hc_", "ffn_gate_inp")):
        std *= 0.5
    if spec.name == "token_embd.weight":
        std = 0.3
    return rng.standard_normal(spec.shape) * std


def _spread_tokens(rng: np.random.Generator, counts: np.ndarray, n_expert: int, n_used: int) -> np.ndarray:
    """Give each token distinct experts, the frequent ones first and to the experts with the least to do: int32 [V, X]."""
    table = np.empty((len(counts), n_used), np.int32)
    load = rng.random(n_expert)  # breaks ties
    for token in np.argsort(-counts, kind="stable"):
        table[token] = np.argsort(load, kind="stable")[:n_used]
        load[table[token]] += counts[token] + 1.0
    return table


class GivenWeights:
    """Fills a model's leaves from weights by name, inside a traced function; see `ds4jax.model.weights.Source`."""

    def __init__(self, weights: Mapping[str, jax.Array]) -> None:
        self._weights = weights

    def kind(self, name: str) -> str:
        """All are plain float32 while they are trained."""
        return "F32"

    def matrix(
        self, layers: Sequence[Sequence[str]], rows: Sequence[int], shape: tuple[int, ...], *, stacked: bool, prepared: str | None
    ) -> Any:
        """Return a QTensor of float32."""
        joined = [jnp.concatenate([self._weights[name] for name in names], axis=-2) for names in layers]
        return QTensor("F32", {"w": jnp.stack(joined) if stacked else joined[0]})

    def array(self, names: Sequence[str], shape: tuple[int, ...], dtype: str, *, stacked: bool) -> Any:
        """Return an array."""
        arrays = [self._weights[name] for name in names]
        return jnp.stack(arrays) if stacked else arrays[0]


def build_model(config: ModelConfig, weights: Mapping[str, jax.Array]) -> Transformer:
    """Build our own model from weights by name. Its rows are plain numbers: the training forward rounds them by itself."""
    kinds = tuple((spec.name, "F32") for spec in ds4_tensors(config, "q8"))
    return build(ModelSpec(config, kinds, "none", "float32"), GivenWeights(weights))
