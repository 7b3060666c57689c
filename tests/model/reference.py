"""The model again, in plain NumPy: no cache, no stacks, no batches, no packed weights. What the fast one must agree with.

A whole prompt at a time and kv_quant="none". Letters as in `ds4jax.model`; every weight is expanded to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ds4jax.config import ModelConfig
from ds4jax.model.gguf.reader import GGUFFile

F32 = np.float32
Weights = Callable[[str], np.ndarray]


class Reference:
    """One model file, to be asked for the logits of a prompt."""

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        self.config: ModelConfig = file.config
        self.weights = {name: tensor.values() for name, tensor in file.tensors.items()}

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Compute the logits after every token: f32 [T, V]."""
        c, ids = self.config, np.asarray(tokens)
        x = np.repeat(self.weights["token_embd.weight"][ids][:, None, :], c.n_hc, axis=1)  # [T, H, D]
        for layer in range(c.n_layer):
            w = self.layer(layer)
            inner, post, comb = self.collapse(x, w, "hc_attn")
            x = spread(self.attention(layer, rms(inner, c.rms_eps) * w("attn_norm.weight")), x, post, comb)
            inner, post, comb = self.collapse(x, w, "hc_ffn")
            x = spread(self.experts(layer, rms(inner, c.rms_eps) * w("ffn_norm.weight"), ids), x, post, comb)
        mix = rms(x.reshape(len(x), -1), c.rms_eps) @ self.weights["output_hc_fn.weight"].T
        pre = sigmoid(mix * self.weights["output_hc_scale.weight"] + self.weights["output_hc_base.weight"]) + c.hc_eps
        y = np.einsum("th,thd->td", pre, x)
        return (rms(y, c.rms_eps) * self.weights["output_norm.weight"] @ self.weights["output.weight"].T).astype(F32)

    def layer(self, layer: int) -> Weights:
        """Return the weights of a layer, by suffix."""
        return lambda suffix: self.weights[f"blk.{layer}.{suffix}"]

    # ------------------------------------------------------------------ hyper-connections
    def collapse(self, x: np.ndarray, w: Weights, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Streams [T, H, D] -> a block's input [T, D], and how to spread its output: [T, H] and [T, H, H]."""
        h, eps = self.config.n_hc, self.config.hc_eps
        scale, base = w(f"{name}_scale.weight"), w(f"{name}_base.weight")
        mix = rms(x.reshape(len(x), -1), self.config.rms_eps) @ w(f"{name}_fn.weight").T
        pre = sigmoid(mix[:, :h] * scale[0] + base[:h]) + eps
        post = 2 * sigmoid(mix[:, h : 2 * h] * scale[1] + base[h : 2 * h])
        comb = softmax((mix[:, 2 * h :] * scale[2] + base[2 * h :]).reshape(-1, h, h), 2) + eps
        comb /= comb.sum(1, keepdims=True) + eps
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb /= comb.sum(2, keepdims=True) + eps
            comb /= comb.sum(1, keepdims=True) + eps
        return np.einsum("th,thd->td", pre, x), post, comb

    # ------------------------------------------------------------------ attention
    def attention(self, layer: int, n: np.ndarray) -> np.ndarray:
        """Attention of a whole prompt: [T, D] -> [T, D]."""
        c, w, ratio = self.config, self.layer(layer), self.config.compress_ratios[layer]
        t = len(n)
        p = np.arange(t)
        omega = self.omega(ratio)
        lora = rms(n @ w("attn_q_a.weight").T, c.rms_eps) * w("attn_q_a_norm.weight")
        q = rms((lora @ w("attn_q_b.weight").T).reshape(t, c.n_head, c.head_dim), c.rms_eps)
        q = rotate(q, p[:, None], omega)
        rows = rotate(rms(n @ w("attn_kv.weight").T, c.rms_eps) * w("attn_kv_a_norm.weight"), p, omega)
        behind = p[:, None] - p[None, :]
        seen = (behind >= 0) & (behind < c.n_window)
        if ratio and t >= ratio:
            pooled = self.pool(w, "attn_compressor", n, ratio, omega)
            visible = np.arange(len(pooled))[None, :] < (p[:, None] + 1) // ratio
            if ratio == 4:
                visible = self.choose(w, n, lora, omega, visible)
            rows, seen = np.concatenate([rows, pooled]), np.concatenate([seen, visible], axis=1)
        score = np.where(seen[:, None, :], q @ rows.T / np.sqrt(c.head_dim), -np.inf)  # [T, N, rows]
        sink = np.broadcast_to(w("attn_sinks.weight")[None, :, None], (t, c.n_head, 1))
        o = softmax(np.concatenate([score, sink], axis=2), 2)[:, :, :-1] @ rows
        o = rotate(o, p[:, None], -omega).reshape(t, c.n_out_group, -1)
        low_rank = w("attn_output_a.weight").reshape(c.n_out_group, c.o_lora_rank, -1)
        return np.einsum("tgi,gri->tgr", o, low_rank).reshape(t, -1) @ w("attn_output_b.weight").T

    def omega(self, ratio: int) -> np.ndarray:
        """Angles a token [R/2]: plain on layers without compression, stretched by YaRN on the others."""
        c = self.config
        i = np.arange(c.n_rot // 2)
        base = c.rope_base_compressed if ratio else c.rope_base
        omega = base ** (-2.0 * i / c.n_rot)
        if ratio:
            low, high = (
                c.n_rot * np.log(c.yarn_original_ctx / (2 * np.pi * b)) / (2 * np.log(base)) for b in (c.yarn_beta_fast, c.yarn_beta_slow)
            )
            low, high = max(np.floor(low), 0), min(np.ceil(high), c.n_rot - 1)
            keep = 1 - np.clip((i - low) / max(high - low, 1e-3), 0, 1)
            omega = omega * (keep + (1 - keep) / c.yarn_factor)
        return omega.astype(F32)

    def pool(self, w: Weights, prefix: str, n: np.ndarray, ratio: int, omega: np.ndarray) -> np.ndarray:
        """Finished compressed rows of a prompt: [T // ratio, width]."""
        count = len(n) // ratio
        n = n[: count * ratio]
        ape = np.tile(w(f"{prefix}_ape.weight"), (count, 1))
        u = (n @ w(f"{prefix}_kv.weight").T).reshape(count, ratio, -1)
        z = (n @ w(f"{prefix}_gate.weight").T + ape).reshape(count, ratio, -1)
        if ratio == 4:  # the first half of the columns pools the window before, the second half its own
            width = u.shape[2] // 2
            before = [np.concatenate([np.full_like(a[:1], start), a[:-1]])[:, :, :width] for a, start in ((u, 0.0), (z, -np.inf))]
            u, z = (np.concatenate([b, a[:, :, width:]], axis=1) for b, a in zip(before, (u, z), strict=True))
        pooled = (softmax(z, 1) * u).sum(1)
        return rotate(rms(pooled, self.config.rms_eps) * w(f"{prefix}_norm.weight"), np.arange(count) * ratio, omega)

    def choose(self, w: Weights, n: np.ndarray, lora: np.ndarray, omega: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """Keep of the visible rows [T, C] those with the best index scores."""
        c, t = self.config, len(n)
        key = self.pool(w, "indexer_compressor", n, 4, omega)
        q = rotate((lora @ w("indexer.attn_q_b.weight").T).reshape(t, c.n_index_head, c.index_dim), np.arange(t)[:, None], omega)
        weight = n @ w("indexer.proj.weight").T / np.sqrt(c.n_index_head * c.index_dim)
        score = np.einsum("ti,tic->tc", weight, np.maximum(q @ key.T, 0))
        best = np.argsort(-np.where(visible, score, -np.inf), axis=1, kind="stable")[:, : c.index_top_k]
        chosen = np.zeros_like(visible)
        np.put_along_axis(chosen, best, True, axis=1)
        return visible & chosen

    # ------------------------------------------------------------------ experts
    def experts(self, layer: int, n: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Routed experts and the shared one: [T, D] -> [T, D]."""
        c, w = self.config, self.layer(layer)
        score = np.sqrt(np.logaddexp(F32(0), n @ w("ffn_gate_inp.weight").T))
        if layer < c.n_hash_layer:
            expert = w("ffn_gate_tid2eid.weight")[ids]
        else:
            expert = np.argsort(-(score + w("exp_probs_b.bias")), axis=1, kind="stable")[:, : c.n_expert_used]
        weight = np.take_along_axis(score, expert, axis=1)
        weight = weight / np.maximum(weight.sum(1, keepdims=True), 2.0**-14) * c.expert_scale
        names = ("gate", "up", "down")
        out = swiglu(n, *(w(f"ffn_{k}_shexp.weight") for k in names), c.swiglu_clamp_shared[layer])
        stacks = [w(f"ffn_{k}_exps.weight") for k in names]
        for e in range(c.n_expert):
            token, place = np.nonzero(expert == e)
            np.add.at(out, token, swiglu(n[token], *(s[e] for s in stacks), c.swiglu_clamp[layer]) * weight[token, place][:, None])
        return out


def spread(out: np.ndarray, x: np.ndarray, post: np.ndarray, comb: np.ndarray) -> np.ndarray:
    """A block's output [T, D] back into the streams [T, H, D]; comb's first index is the stream it comes from."""
    return (post[:, :, None] * out[:, None, :] + np.einsum("tjk,tjd->tkd", comb, x)).astype(F32)


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, clamp: float) -> np.ndarray:
    g, u = np.minimum(x @ gate.T, clamp), np.clip(x @ up.T, -clamp, clamp)
    return (g * sigmoid(g) * u) @ down.T


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    return (x / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True) + eps)).astype(F32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rotate(x: np.ndarray, position: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """Rotate the last channels of x [..., n] in pairs of neighbours; position broadcasts with x[..., 0]."""
    theta = position[..., None].astype(F32) * omega
    first = x.shape[-1] - 2 * len(omega)
    a, b = x[..., first::2], x[..., first + 1 :: 2]
    out = x.astype(F32, copy=True)
    out[..., first::2], out[..., first + 1 :: 2] = a * np.cos(theta) - b * np.sin(theta), a * np.sin(theta) + b * np.cos(theta)
    return out
