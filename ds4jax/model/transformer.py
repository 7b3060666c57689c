"""The whole model: embedding, blocks in stacks, head.

Layers that repeat are stacked: Flash's 43 layers are three stacks, [window, hash] x 2, [ratio 4, hash] x 1 and
[ratio 128, ratio 4] x 20. A stack's weights have a leading axis, and a scan runs its pattern: one program body for
each kind of layer, and few leaves, since every leaf costs dispatch time.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.config import ModelConfig
from ds4jax.model import fused
from ds4jax.model.attention import Attention, LayerIndex, Span
from ds4jax.model.cache import KVCache
from ds4jax.model.hyper import HyperConnection, HyperHead
from ds4jax.model.moe import Experts, MoE
from ds4jax.model.norm import rms_norm
from ds4jax.model.quant import QTensor, embed, matmul, take_layer
from ds4jax.model.quant.kernels import dense
from ds4jax.model.weights import LayerTake, StackPlan, Take

M = TypeVar("M")


class Block(nnx.Module):
    """One layer: hyper-connected attention, then hyper-connected experts."""

    def __init__(self, config: ModelConfig, take: LayerTake, layer: int, kv_quant: str) -> None:
        self.config = config
        self.ratio = config.compress_ratios[layer]
        self.hc_attn = HyperConnection(config, take, "hc_attn")
        self.attn_norm = nnx.Param(take.vector("attn_norm.weight", config.n_embd))
        self.attn = Attention(config, take, "", self.ratio, kv_quant)
        self.hc_ffn = HyperConnection(config, take, "hc_ffn")
        self.ffn_norm = nnx.Param(take.vector("ffn_norm.weight", config.n_embd))
        self.ffn = MoE(
            config,
            take,
            "",
            hashed=layer < config.n_hash_layer,
            clamp=config.swiglu_clamp[layer],
            clamp_shared=config.swiglu_clamp_shared[layer],
        )

    def __call__(
        self, x: jax.Array, token: jax.Array, cache: KVCache, at: LayerIndex, repeat: jax.Array, span: Span, dtype: jnp.dtype
    ) -> tuple[jax.Array, KVCache]:
        """Run the layer on streams x [M, H, D] f32; repeat: its index in the stack (for the expert weights)."""
        eps = self.config.rms_eps
        m, _, d = x.shape
        with jax.named_scope("attn"):
            a, post, comb = self.hc_attn.pre(x)
            a = rms_norm(a, eps, self.attn_norm.get_value())
            out, cache = self.attn(a.reshape(span.slot.shape[0], -1, d), cache, at, span, dtype)
            x = HyperConnection.post(out.reshape(m, d), x, post, comb)
        with jax.named_scope("ffn"):
            f, post, comb = self.hc_ffn.pre(x)
            f = rms_norm(f, eps, self.ffn_norm.get_value())
            x = HyperConnection.post(self.ffn(f, token, span.live(m // span.slot.shape[0], cache.n_slot), repeat, dtype), x, post, comb)
        return x, cache


class Stack(nnx.Module):
    """A pattern of layers that repeats n times; every leaf has the leading axis n."""

    def __init__(self, config: ModelConfig, take: Take, plan: StackPlan, kv_quant: str) -> None:
        self.config, self.plan = config, plan
        self.blocks = nnx.List([Block(config, take.stacked(plan, p), plan.first + p, kv_quant) for p in range(plan.period)])

    def __call__(self, x: jax.Array, token: jax.Array, cache: KVCache, span: Span, dtype: jnp.dtype) -> tuple[jax.Array, KVCache]:
        """Run all layers of the stack on streams x [M, H, D]."""

        def body(carry: tuple[jax.Array, KVCache], i: Any) -> tuple[tuple[jax.Array, KVCache], None]:
            x, cache = carry
            for p, block in enumerate(self.layer(self.blocks, i)):
                x, cache = block(x, token, cache, self.layer_index(p, i), i, span, dtype)
            return (x, cache), None

        if self.plan.repeats == 1:  # a loop of one would only hide constant indices from the compiler
            return body((x, cache), 0)[0]
        return jax.lax.scan(body, (x, cache), jnp.arange(self.plan.repeats))[0]

    @staticmethod
    def layer(part: M, i: Any) -> M:
        """Cut modules of the stack to the leaves of round i; experts stay whole."""
        graph, *states = nnx.split(part, Experts, ...)
        experts, rest = states

        def cut(leaf: Any) -> Any:
            return take_layer(leaf, i) if isinstance(leaf, QTensor) else jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)

        return nnx.merge(graph, experts, jax.tree.map(cut, rest, is_leaf=lambda leaf: isinstance(leaf, QTensor)))

    def layer_index(self, p: int, i: Any) -> LayerIndex:
        """Find where member p of the pattern keeps its state in round i."""
        ratios, first, period = self.config.compress_ratios, self.plan.first, self.plan.period
        before, a_round = (ratios[at].count(ratios[first + p]) for at in (slice(first + p), slice(first, first + period)))
        return LayerIndex(raw=first + p + i * period, comp=before + i * a_round)


class Transformer(nnx.Module):
    """All weights and the forward pass. Matrices of any GGUF type; compute type of products chosen by the caller.

    kernels: whether layers run on kernels (`fused`).
    """

    def __init__(self, config: ModelConfig, take: Take, kv_quant: str) -> None:
        self.config, self.kernels = config, take.kernels
        self.token_embd = nnx.Param(take.lookup("token_embd.weight", config.n_vocab, config.n_embd))
        self.stacks = nnx.List([Stack(config, take, plan, kv_quant) for plan in take.plans])
        self.output_hc = HyperHead(config, take)
        self.output_norm = nnx.Param(take.vector("output_norm.weight", config.n_embd))
        self.output = nnx.Param(take.matrix("output.weight", config.n_vocab, config.n_embd))

    def __call__(self, token: jax.Array, cache: KVCache, span: Span, dtype: jnp.dtype) -> tuple[jax.Array, KVCache]:
        """Run tokens [B, T] int32 through all layers: streams [B, T, H, D] f32, and the cache (its positions unchanged)."""
        flat = token.reshape(-1)
        x = embed(flat, self.token_embd.get_value())  # [M, D]
        x = jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.n_hc, x.shape[1]))
        if self.kernels and fused.takes(cache, self.config, *token.shape):
            x, cache = fused.run(self.stacks, x, flat, cache, span, self.config.n_expert_used)
        else:
            for stack in self.stacks:
                x, cache = stack(x, flat, cache, span, dtype)
        return x.reshape(*token.shape, *x.shape[1:]), cache

    def logits(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Collapse streams [M, H, D] and project them: [M, V] f32."""
        y = rms_norm(self.output_hc(x), self.config.rms_eps, self.output_norm.get_value())
        output = self.output.get_value()
        if self.kernels and dense.fits(stacked := jax.tree.map(lambda a: a[None], output), x.shape[0]):
            return dense.dense_matmul(y.astype(dtype), stacked, jnp.zeros(1, jnp.int32))
        return matmul(y.astype(dtype), output, out_dtype=jnp.float32)
