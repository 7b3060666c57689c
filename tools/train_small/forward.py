"""The whole model over whole sequences, differentiable: the twin of `ds4jax.model.transformer` for training."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ds4jax.model.hyper import HyperConnection
from ds4jax.model.moe import MoE, swiglu
from ds4jax.model.norm import rms_norm
from ds4jax.model.quant import dequantize, embed
from ds4jax.model.transformer import Block, Stack, Transformer
from tools.train_small import mixing
from tools.train_small.attend import Sequences, attend
from tools.train_small.products import contract, product


class Report(NamedTuple):
    """What a layer tells besides its result; of several layers, each value has an axis more in front.

    load: the share of tokens that each expert gets, f32 [E]. index_loss: see `attend`. excess: see `mixing`."""

    load: jax.Array
    index_loss: jax.Array
    excess: jax.Array


def hidden(model: Transformer, token: jax.Array, at: Sequences, dtype: jnp.dtype) -> tuple[jax.Array, Report]:
    """Run tokens [B, T] int32, each row from an empty cache, T whole windows of the attention.

    Returns:
        what the output matrix is multiplied with, f32 [B, T, D], and the report of all layers.
    """
    b, t = token.shape
    x = embed(token.reshape(-1), model.token_embd.get_value())
    x = jnp.broadcast_to(x[:, None, :], (b * t, model.config.n_hc, x.shape[1])).astype(dtype)
    reports = []
    for stack in model.stacks:
        x, report = _run_stack(stack, x, token, at, dtype)
        reports.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), report))
    y = rms_norm(mixing.head(model.output_hc, x), model.config.rms_eps, model.output_norm.get_value())
    return y.reshape(b, t, -1), jax.tree.map(lambda *layers: jnp.concatenate(layers), *reports)


def logits(model: Transformer, y: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Project what `hidden` returns: f32 [..., V]."""
    return product(y, model.output.get_value(), dtype)


def _run_stack(stack: Stack, x: jax.Array, token: jax.Array, at: Sequences, dtype: jnp.dtype) -> tuple[jax.Array, Report]:
    """Run a stack's layers, round by round, on streams x [M, H, D]; what is reported has axes [rounds, period] in front."""
    graph, state = nnx.split(stack.blocks)

    def round_of(x: jax.Array, layer: Any) -> tuple[jax.Array, Report]:
        reports = []
        for block in nnx.merge(graph, layer):
            x, report = _run_block(block, x, token, at, dtype)
            reports.append(report)
        return x, jax.tree.map(lambda *values: jnp.stack(values), *reports)

    # Of a layer only the results of products are kept for its gradient; memory traffic is what a step's time goes to.
    return jax.lax.scan(jax.checkpoint(round_of, policy=jax.checkpoint_policies.dots_saveable), x, state)


def _run_block(block: Block, x: jax.Array, token: jax.Array, at: Sequences, dtype: jnp.dtype) -> tuple[jax.Array, Report]:
    """Run one layer; compare `Block.__call__`."""
    eps = block.config.rms_eps
    a, post, comb, excess = mixing.pre(block.hc_attn, x)
    a = rms_norm(a, eps, block.attn_norm.get_value())
    out, index_loss = attend(block.attn, a.reshape(*token.shape, -1), at, dtype)
    x = HyperConnection.post(out.reshape(a.shape), x, post, comb).astype(dtype)
    f, post, comb, more_excess = mixing.pre(block.hc_ffn, x)
    out, load = _experts(block.ffn, rms_norm(f, eps, block.ffn_norm.get_value()), token.reshape(-1), dtype)
    return HyperConnection.post(out, x, post, comb).astype(dtype), Report(load, index_loss, excess + more_excess)


def _experts(moe: MoE, x: jax.Array, token: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Apply all experts to all tokens x [M, D] f32, each with its weight (0 where it was not chosen).

    With few experts that is less work than sorting tokens. Returns f32 [M, D] and the load, f32 [E].
    """
    expert, weight = moe.choose(x, token)
    chosen = jax.nn.one_hot(expert, moe.config.n_expert, dtype=jnp.float32)  # [M, X, E]
    share = jnp.einsum("mx,mxe->me", weight, chosen)
    gate, up, down = (dequantize(w.get_value(), dtype) for w in (moe.gate_exps, moe.up_exps, moe.down_exps))
    e, f, d = gate.shape
    inner = swiglu(product(x, gate.reshape(e * f, d), dtype), product(x, up.reshape(e * f, d), dtype), moe.clamp)
    inner = (inner.reshape(-1, e, f) * share[:, :, None]).reshape(-1, e * f)
    routed = contract("mi,id->md", inner, jnp.swapaxes(down, 1, 2).reshape(e * f, d), dtype)
    joined = moe.gate_up_shexp.get_value()
    shared_gate, shared_up = joined.split(product(x, joined.groups[0], dtype))
    shared = product(swiglu(shared_gate, shared_up, moe.clamp_shared), moe.down_shexp.get_value(), dtype)
    return routed + shared, jnp.mean(jnp.sum(chosen, axis=1), axis=0)
