"""Mixture of experts: a router (by score or by token id), routed experts, and one shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.config import ModelConfig
from ds4jax.model.quant import QTensor, dequantize, dot, expert_apply, matmul, precise_matmul, project, route, take_layer
from ds4jax.model.quant.kernels import experts, grouped
from ds4jax.model.sums import ordered_sum
from ds4jax.model.weights import Take


class Experts(nnx.Param):
    """Weights of all routed experts, [n, E, ...] in a stack of n layers. They stay whole where other leaves are cut to a
    layer: their product picks layer and expert together, so nobody copies the experts of a layer to use a few."""


FEW_EXPERTS = 8  # that are expanded together for a few rows; measured with six, of which a row takes two
PRODUCT_COLUMNS = 16  # a library adds in another order where a product has no multiple of so many
GROUPED_FROM = 256  # tokens that share the decoding of an expert's weights; fewer meet it one by one
MIN_WEIGHT_SUM = 2.0**-14  # floor of the routing weights' sum, as ds4 has it


class MoE(nnx.Module):
    """One layer's feed-forward block.

    hashed: the layer takes its experts from a table by token id; its router still gives the weights.
    """

    def __init__(self, config: ModelConfig, take: Take, prefix: str, *, hashed: bool, clamp: float, clamp_shared: float) -> None:
        self.config, self.clamp, self.clamp_shared, self.kernels = config, clamp, clamp_shared, take.kernels
        d, e, f, x = config.n_embd, config.n_expert, config.n_ff, config.n_expert_used
        self.gate_inp = nnx.Param(take.matrix(f"{prefix}ffn_gate_inp.weight", e, d))
        self.tid2eid = nnx.Param(take.table(f"{prefix}ffn_gate_tid2eid.weight", config.n_vocab, x)) if hashed else None
        self.exp_probs_b = None if hashed else nnx.Param(take.vector(f"{prefix}exp_probs_b.bias", e))
        self.gate_exps = Experts(take.experts(f"{prefix}ffn_gate_exps.weight", e, f, d))
        self.up_exps = Experts(take.experts(f"{prefix}ffn_up_exps.weight", e, f, d))
        self.down_exps = Experts(take.experts(f"{prefix}ffn_down_exps.weight", e, d, f))
        self.gate_up_shexp = nnx.Param(take.joined({f"{prefix}ffn_gate_shexp.weight": f, f"{prefix}ffn_up_shexp.weight": f}, d))
        self.down_shexp = nnx.Param(take.matrix(f"{prefix}ffn_down_shexp.weight", d, f))

    def choose(self, x: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose experts for x [M, D] f32 of input tokens [M] int32: ids [M, X] int32 and weights [M, X] f32."""
        gate = self.gate_inp.get_value()
        logits = precise_matmul(x, gate) if self.kernels and gate.kind == "F16" else matmul(x, gate)
        score = jnp.sqrt(jax.nn.softplus(logits))  # [M, E]
        if self.tid2eid is not None:
            expert = self.tid2eid.get_value()[token]
        else:
            bias = self.exp_probs_b.get_value()[None, :]  # type: ignore[union-attr]
            expert = jax.lax.top_k(score + bias, self.config.n_expert_used)[1]  # equal scores: the lower id
        weight = jnp.take_along_axis(score, expert, axis=1)
        total = jnp.maximum(ordered_sum(weight, 1), MIN_WEIGHT_SUM)
        return expert, weight / total * self.config.expert_scale

    def __call__(self, x: jax.Array, token: jax.Array, live: jax.Array, layer: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Apply the block.

        Args:
            x: [M, D] f32, normalised. token: int32 [M], the input ids (hash layers route by them).
            live: bool [M]; padding chooses no expert, so that it costs none.
            layer: index of this layer in its stack of expert weights.

        Returns:
            [M, D] f32.
        """
        m, d = x.shape
        expert, weight = self.choose(x, token)
        n_used = expert.shape[1]
        chosen = jnp.where(live[:, None], expert, self.config.n_expert).reshape(-1)
        weights = [w.get_value() for w in (self.gate_exps, self.up_exps, self.down_exps)]
        if self.kernels and m >= GROUPED_FROM and grouped.fits(*weights):
            index = jnp.reshape(layer, 1).astype(jnp.int32)
            terms = [grouped.apply_grouped(x, weight, chosen.reshape(m, n_used), weights, index, self.clamp)]
        elif self.kernels:
            order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
            pairs = experts.Pairs(chosen[order].astype(jnp.int32), order)
            routed = experts.apply_experts(x, weight, pairs, weights, jnp.reshape(layer, 1).astype(jnp.int32), self.clamp)
            terms = [routed[:, i] for i in range(n_used)]
        else:
            apply = all_of_them if suits_all(weights, m) else chosen_only
            routed = apply(x.astype(dtype), weight, chosen.reshape(m, n_used), weights, layer, self.clamp).reshape(m, n_used, d)
            terms = [routed[:, i] for i in range(n_used)]

        gate_up = self.gate_up_shexp.get_value()
        gate, up = gate_up.split(project(x.astype(dtype), gate_up, out_dtype=jnp.float32))
        shared = matmul(swiglu(gate, up, self.clamp_shared).astype(dtype), self.down_shexp.get_value(), out_dtype=jnp.float32)
        # Term by term: elementwise sums fuse, where a reduction over so short an axis is a slow kernel of its own on a CPU.
        return sum(terms, shared)


def chosen_only(x: jax.Array, weight: jax.Array, chosen: jax.Array, weights: list[QTensor], layer: jax.Array, clamp: float) -> jax.Array:
    """Apply to each row the experts that it chose, visited one by one.

    Args:
        x: [M, D]. weight: [M, X] f32. chosen: int32 [M, X], E where a row chooses nobody.
        weights: gate and up [L, E, F, D], and down [L, E, D, F], of which `layer` is used. clamp: of `swiglu`.

    Returns:
        f32 [M*X, D], 0 where nobody is chosen.
    """

    def one(w1: QTensor, w3: QTensor, w2: QTensor, x: jax.Array, weight: jax.Array) -> jax.Array:
        gate, up = (matmul(x, w, out_dtype=jnp.float32) for w in (w1, w3))
        hidden = swiglu(gate, up, clamp) * weight
        return matmul(hidden.astype(x.dtype), w2, out_dtype=jnp.float32)

    plan = route(chosen.reshape(-1), weights[0].shape[1])
    return expert_apply(one, weights, [jnp.repeat(x, weight.shape[1], axis=0), weight.reshape(-1, 1)], plan, layer)


def all_of_them(x: jax.Array, weight: jax.Array, chosen: jax.Array, weights: list[QTensor], layer: jax.Array, clamp: float) -> jax.Array:
    """Do as `chosen_only`, and give the same bits, by applying every expert of the layer to every row and picking what was chosen."""
    m, n_used = weight.shape
    w1, w3, w2 = (dequantize(take_layer(w, layer), x.dtype) for w in weights)  # [E, F, D] twice, [E, D, F]
    n_expert, more = len(w1), -m % PRODUCT_COLUMNS
    rows = jnp.pad(x, ((0, more), (0, 0)))
    # Weights stand first: as the second operand a library would turn all of them around before every product.
    gate, up = (dot(w.reshape(-1, w.shape[-1]), rows).reshape(*w.shape[:2], -1) for w in (w1, w3))  # [E, F, M]
    is_chosen = chosen[None] == jnp.arange(n_expert)[:, None, None]  # [E, M, X]
    # Weights are positive, and the same where a row names an expert twice.
    scale = jnp.pad(jnp.max(jnp.where(is_chosen, weight, 0), axis=-1), ((0, 0), (0, more)))
    hidden = swiglu(gate, up, clamp) * scale[:, None, :]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = jnp.einsum("edf,efm->edm", w2, hidden.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
    picked = y.at[chosen, :, jnp.arange(m)[:, None]].get(mode="clip")  # [M, X, D]
    return jnp.where((chosen < n_expert)[..., None], picked, 0).reshape(m * n_used, -1)


def suits_all(weights: list[QTensor], n_row: int) -> bool:
    """Whether `all_of_them` is faster: where the experts are few and most of the work is to expand them, which all cores share in one
    large operation but not in small ones. So it is on a CPU, but for formats that lie by columns, whose expansion costs little.
    """
    is_costly = jax.default_backend() == "cpu" and not any(w.matrix for w in weights)
    return is_costly and weights[0].shape[1] <= FEW_EXPERTS and 1 < n_row <= GROUPED_FROM


def swiglu(gate: jax.Array, up: jax.Array, clamp: float) -> jax.Array:
    """silu(min(gate, clamp)) * clip(up, -clamp, clamp), elementwise f32; the gate is clamped above only."""
    return jax.nn.silu(jnp.minimum(gate, clamp)) * jnp.clip(up, -clamp, clamp)
