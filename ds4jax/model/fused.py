"""The layers on a GPU, in as few launches as they take.

The same mathematics as `transformer.Block`, which is the twin of this file: there every operation is plain array code,
here each line of a decode step is one kernel. What a kernel takes from a layer's weights it reads inside the whole stack;
nothing is copied, and no loop asks the host how long it runs. A prompt's chunk enters and leaves its blocks the same way;
inside them it has enough tokens for matrix products of expanded weights, and kernels where those would not do
(`Attention`, `MoE`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ds4jax.config import ModelConfig
from ds4jax.model.attention import Attention, LayerIndex, Span, takes_chunk
from ds4jax.model.cache import KVCache
from ds4jax.model.compressor import Compressor
from ds4jax.model.hyper import HyperConnection
from ds4jax.model.kernels import attend, extend, hyper, index, router
from ds4jax.model.moe import MIN_WEIGHT_SUM, MoE
from ds4jax.model.quant import QTensor
from ds4jax.model.quant.kernels import dense, experts
from ds4jax.model.rope import frequencies

if TYPE_CHECKING:
    from ds4jax.model.transformer import Block, Stack, Transformer

MOST_ROWS = 64  # of a step

F32 = jnp.dtype(jnp.float32)
Inputs = dict[jnp.dtype, jax.Array]  # of a block [M, D], in each type that something takes
RunLayer = Callable[[int, jax.Array, "Streams", KVCache], tuple["Streams", KVCache]]


def fits(model: Transformer) -> bool:
    """Whether the kernels take a model of this shape and these formats; its leaves may be shapes, of experts prepared for kernels."""
    c = model.config
    if c.n_rot != 64 or c.head_dim % 64 or c.n_head & (c.n_head - 1):
        return False
    return all(_takes_block(block) for stack in model.stacks for block in stack.blocks)


def _takes_block(block: Block) -> bool:
    c, attn, ffn = block.config, block.attn, block.ffn
    inputs, gate_up = attn.inputs.get_value(), ffn.gate_up_shexp.get_value()
    products = [attn.q_b, attn.output_b, ffn.gate_inp, ffn.down_shexp, *([attn.indexer.attn_q_b] if attn.ratio == 4 else [])]
    plain = [*inputs.groups, *gate_up.groups, *(p.get_value() for p in products)]
    q, k = c.q_lora_rank, c.head_dim
    return (
        all(dense.fits(w, MOST_ROWS) for w in plain)
        and dense.fits(attn.output_a.get_value(), MOST_ROWS, c.n_out_group)
        and inputs.places[:2] == ((0, q), (q, q + k))  # `extend` reads them there
        and len(gate_up.groups) == 1
        and all(hyper.fits(c.n_hc, c.n_embd, hc.fn.get_value().kind) for hc in (block.hc_attn, block.hc_ffn))
        and experts.fits(*(w.get_value() for w in (ffn.gate_exps, ffn.up_exps, ffn.down_exps)))
    )


def takes(cache: KVCache, config: ModelConfig, n_row: int, n_token: int) -> bool:
    """Whether the kernels take so many rows of so many tokens on this cache: there are sizes of arrays that they cannot address."""
    if n_token > 1:
        return takes_chunk(cache, config, n_row * n_token)
    attended = all(attend.fits(cache.raw, comp, config.n_head) for comp in (cache.comp4, cache.comp128))
    return n_row <= MOST_ROWS and attended and (cache.index.n_row <= config.index_top_k or index.fits(cache.index))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Streams:
    """Streams before a block's output has joined them: `HyperConnection.post` is left to the launch that reads them next.

    x [M, H, D] as they were before the block; parts [M, n, D] each, whose sum is the block's output; post [M, H]; comb [M, H, H].
    """

    x: jax.Array
    parts: tuple[jax.Array, ...]
    post: jax.Array
    comb: jax.Array

    @classmethod
    def begin(cls, x: jax.Array, n_parts: Sequence[int]) -> Streams:
        """Wrap streams that nothing waits to join, in the shape that a layer with parts of these sizes leaves."""
        m, h, d = x.shape
        nothing = tuple(jnp.zeros((m, n, d), x.dtype) for n in n_parts)
        return cls(x, nothing, jnp.zeros((m, h), x.dtype), jnp.broadcast_to(jnp.eye(h, dtype=x.dtype), (m, h, h)))

    def end(self) -> jax.Array:
        """Join what waits: [M, H, D]."""
        out = sum((jnp.sum(p, axis=1) for p in self.parts[1:]), jnp.sum(self.parts[0], axis=1))
        return HyperConnection.post(out, self.x, self.post, self.comb)


def run(stacks: Sequence[Stack], x: jax.Array, token: jax.Array, cache: KVCache, span: Span, n_used: int) -> tuple[jax.Array, KVCache]:
    """Run all layers of stacks on streams x [M, H, D] of tokens int32 [M], M / B for each row of the span: [M, H, D] and the cache.

    n_used: experts of a token.
    """
    step = len(token) == len(span.slot)
    shared = stacks[0].blocks[0].ffn.down_shexp.get_value()
    streams = Streams.begin(x, (n_used, dense.n_parts(len(token), shared)) if step else (1,))
    for stack in stacks:
        streams, cache = (_run_step if step else _run_chunk)(stack, streams, token, cache, span)
    return streams.end(), cache


def _run_step(stack: Stack, streams: Streams, token: jax.Array, cache: KVCache, span: Span) -> tuple[Streams, KVCache]:
    """Run a stack with one token a row."""

    def layer(p: int, i: jax.Array, streams: Streams, cache: KVCache) -> tuple[Streams, KVCache]:
        block, at = stack.blocks[p], i.reshape(1)
        x, y, post, comb = _site(block.hc_attn, block.attn_norm.get_value(), streams, at, block.attn.inputs.get_value().groups)
        out, cache = _attention(block.attn, y, cache, stack.layer_index(p, i), at, span)
        shared, gate = block.ffn.gate_up_shexp.get_value().groups, block.ffn.gate_inp.get_value()
        x, y, post, comb = _site(block.hc_ffn, block.ffn_norm.get_value(), Streams(x, (out,), post, comb), at, [*shared, gate])
        return Streams(x, _experts(block.ffn, y, token, span.live(1, cache.n_slot), at), post, comb), cache

    return _scan(stack, layer, streams, cache)


def _run_chunk(stack: Stack, streams: Streams, token: jax.Array, cache: KVCache, span: Span) -> tuple[Streams, KVCache]:
    """Run a stack with a chunk of tokens a row."""
    n_row, n_token = len(span.slot), len(token) // len(span.slot)
    live = span.live(n_token, cache.n_slot)

    def layer(p: int, i: jax.Array, streams: Streams, cache: KVCache) -> tuple[Streams, KVCache]:
        block, at = stack.blocks[p], i.reshape(1)
        attn, ffn = stack.layer(block.attn, i), stack.layer(block.ffn, i)
        x, y, post, comb = _site(block.hc_attn, block.attn_norm.get_value(), streams, at)
        out, cache = attn(y[F32].reshape(n_row, n_token, -1), cache, stack.layer_index(p, i), span, jnp.dtype(jnp.bfloat16))
        x, y, post, comb = _site(block.hc_ffn, block.ffn_norm.get_value(), Streams(x, (out.reshape(len(x), 1, -1),), post, comb), at)
        return Streams(x, (ffn(y[F32], token, live, i, jnp.dtype(jnp.bfloat16))[:, None],), post, comb), cache

    return _scan(stack, layer, streams, cache)


def _scan(stack: Stack, layer: RunLayer, streams: Streams, cache: KVCache) -> tuple[Streams, KVCache]:
    """Run layer(member of the pattern, round, streams, cache) for all layers of a stack."""

    def body(carry: tuple[Streams, KVCache], i: jax.Array) -> tuple[tuple[Streams, KVCache], None]:
        for p in range(stack.plan.period):
            carry = layer(p, i, *carry)
        return carry, None

    return jax.lax.scan(body, (streams, cache), jnp.arange(stack.plan.repeats, dtype=jnp.int32))[0]


def _site(
    hc: HyperConnection, norm: jax.Array, streams: Streams, layer: jax.Array, weights: Sequence[QTensor] = ()
) -> tuple[jax.Array, Inputs, jax.Array, jax.Array]:
    """Bring the streams up to date and enter a block: streams [M, H, D], the block's input, post and comb for its output.

    weights: what the input meets on kernels; it comes in the types that these take, beside f32.
    """
    c = hc.config
    x, products = hyper.advance(streams.x, streams.parts, streams.post, streams.comb, hc.fn.get_value(), layer)
    scale, base = hc.scale.get_value(), hc.base.get_value()
    dtypes = list(dict.fromkeys(jnp.dtype(t) for t in (jnp.float32, *(dense.taken_dtype(len(x), w) for w in weights))))
    y, post, comb = hyper.enter(
        x, products, scale, base, norm, layer, n_iter=c.hc_sinkhorn_iters, hc_eps=c.hc_eps, rms_eps=c.rms_eps, dtypes=dtypes
    )
    return x, dict(zip(dtypes, y, strict=True)), post, comb


def _product(y: Inputs, w: QTensor, layer: jax.Array, **options: Any) -> jax.Array:
    """Compute `dense.dense_matmul` of a block's input."""
    dtype = jnp.dtype(dense.taken_dtype(len(y[F32]), w))
    return dense.dense_matmul(y[dtype], w, layer, **options)


def _attention(attn: Attention, y: Inputs, cache: KVCache, at: LayerIndex, layer: jax.Array, span: Span) -> tuple[jax.Array, KVCache]:
    """Run a layer's attention on its input: f32 [M, some parts, D] to be summed, and the cache with the token in it."""
    c = attn.config
    lora, inputs, cache = _extend(attn, y, cache, at, layer, span)
    q = dense.dense_matmul(lora, attn.q_b.get_value(), layer)
    omega = frequencies(c, compressed=attn.ratio != 0)
    comp = {0: None, 4: cache.comp4, 128: cache.comp128}[attn.ratio]
    chosen = None
    if attn.ratio == 4 and cache.comp4.n_row > c.index_top_k:
        iq = dense.dense_matmul(lora, attn.indexer.attn_q_b.get_value(), layer)
        chosen = index.choose_rows(
            iq, inputs[-1], cache.index, jnp.asarray(at.comp), span.slot, span.start, top_k=c.index_top_k, omega=omega
        )
    o = attend.attend(
        q, attn.sinks.get_value(), cache.raw, comp, chosen, jnp.asarray(at.raw), jnp.asarray(at.comp), layer, span.slot, span.start,
        n_head=c.n_head, ratio=attn.ratio, omega=omega, eps=c.rms_eps,
    )  # fmt: skip
    low = dense.dense_matmul(o, attn.output_a.get_value(), layer, groups=c.n_out_group, out_dtype=jnp.bfloat16)
    return dense.dense_parts(low, attn.output_b.get_value(), layer), cache


def _extend(
    attn: Attention, y: Inputs, cache: KVCache, at: LayerIndex, layer: jax.Array, span: Span
) -> tuple[jax.Array, list[jax.Array], KVCache]:
    """Project a layer's input and extend the cache by it: the low-rank query [M, Q] bf16, and the projections of `inputs`."""
    inputs = attn.inputs.get_value()
    products = [_product(y, group, layer) for group in inputs.groups]
    proj = products[0] if len(products) == 1 else jnp.concatenate(products, axis=1)
    jobs: list[tuple[Compressor, str, str]] = []
    if attn.ratio:
        jobs.append((attn.compressor, f"win{attn.ratio}", f"comp{attn.ratio}"))
    if attn.ratio == 4:
        jobs.append((attn.indexer.compressor, "win_index", "index"))
    pools = []
    for i, (compressor, window, rows) in enumerate(jobs):
        first = (inputs.places[2 + 2 * i][0], inputs.places[3 + 2 * i][0])
        ape, norm = compressor.ape.get_value(), compressor.norm.get_value()
        state = getattr(cache, window), getattr(cache, rows)
        pools.append(extend.Pool(first, jnp.reshape(at.comp, 1), ape, norm, *state, attn.ratio, compressor.with_hadamard))
    norms = attn.q_a_norm.get_value(), attn.kv_a_norm.get_value()
    omega = frequencies(attn.config, compressed=attn.ratio != 0)
    lora, raw, done = extend.extend(
        proj, layer, jnp.reshape(at.raw, 1), *norms, cache.raw, pools, span.slot, span.start, omega=omega, eps=attn.config.rms_eps
    )
    changed: dict[str, Any] = {"raw": raw}
    for (_, window, rows), (new_window, new_rows) in zip(jobs, done, strict=True):
        changed |= {window: new_window, rows: new_rows}
    return lora, inputs.split(proj), dataclasses.replace(cache, **changed)


def _experts(moe: MoE, y: Inputs, token: jax.Array, live: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Run a layer's experts on their input: routed [M, X, D] and shared [M, some parts, D], both f32, to be summed."""
    c = moe.config
    bias, table = (None if p is None else p.get_value() for p in (moe.exp_probs_b, moe.tid2eid))
    logits = _product(y, moe.gate_inp.get_value(), layer)
    weight, pairs = router.choose(
        logits, bias, table, token, live, layer, n_used=c.n_expert_used, scale=c.expert_scale, least=MIN_WEIGHT_SUM
    )
    weights = [w.get_value() for w in (moe.gate_exps, moe.up_exps, moe.down_exps)]
    routed = experts.apply_experts(y[F32], weight, pairs, weights, layer, moe.clamp)
    gate_up = moe.gate_up_shexp.get_value().groups
    hidden = _product(y, gate_up[0], layer, swiglu_clamp=moe.clamp_shared, out_dtype=jnp.bfloat16)
    return routed, dense.dense_parts(hidden, moe.down_shexp.get_value(), layer)
