"""Compare single-stream decoding with transformers' eager `DeepseekV4ForCausalLM` on the same weights and machine.

    python benchmarks/transformers_baseline.py MODEL.gguf [--prompt 32] [--tokens 64] [--csv FILE]

Needs an environment of its own, never installed by the project: torch, transformers 5.17 and ds4jax
(`pip install torch transformers==5.17.0 -e .`). The weights are expanded to float32, so take a small model,
such as one from `ds4jax synth`. transformers runs with eager attention, eager experts and its cache, with one torch thread and
with all, and the faster one counts. Before anything is timed, both must give the same logits for a short prompt.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import ds4jax
from ds4jax.cli.bench_report import append_csv, origin, print_table
from ds4jax.config import ModelConfig
from ds4jax.model.gguf.reader import GGUFFile
from ds4jax.serving.engine.bench import device_name

TOLERANCE = 1e-3  # largest difference of any logit
BAR = 10.0  # times faster than transformers
LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output_hc_fn.weight": "model.hc_head.hc_fn",
    "output_hc_base.weight": "model.hc_head.hc_base",
    "output_hc_scale.weight": "model.hc_head.hc_scale",
}
# Suffix after "blk.N." -> suffix after "model.layers.N."; gate and up of the experts are joined apart.
LAYER_NAMES = {
    **{f"hc_{part}_{leaf}.weight": f"{part}_hc.{leaf}" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_norm.weight",
    "attn_q_b.weight": "self_attn.q_b_proj.weight",
    "attn_kv.weight": "self_attn.kv_proj.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_norm.weight",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_output_a.weight": "self_attn.o_a_proj.weight",
    "attn_output_b.weight": "self_attn.o_b_proj.weight",
    "attn_compressor_kv.weight": "self_attn.compressor.kv_proj.weight",
    "attn_compressor_gate.weight": "self_attn.compressor.gate_proj.weight",
    "attn_compressor_ape.weight": "self_attn.compressor.position_bias",
    "attn_compressor_norm.weight": "self_attn.compressor.kv_norm.weight",
    "indexer.attn_q_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "indexer.proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "indexer_compressor_kv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "indexer_compressor_gate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "indexer_compressor_ape.weight": "self_attn.compressor.indexer.position_bias",
    "indexer_compressor_norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}


def hf_config(c: ModelConfig) -> DeepseekV4Config:
    """Describe the same shape to transformers."""
    if len(set(c.swiglu_clamp + c.swiglu_clamp_shared)) != 1:
        raise SystemExit("the file clamps layers differently, which transformers cannot express")
    partial = c.n_rot / c.head_dim
    compress = {
        "rope_type": "yarn", "factor": c.yarn_factor, "beta_fast": c.yarn_beta_fast, "beta_slow": c.yarn_beta_slow,
        "original_max_position_embeddings": c.yarn_original_ctx, "rope_theta": c.rope_base_compressed, "partial_rotary_factor": partial,
        "attention_factor": 1.0,
    }  # fmt: skip
    return DeepseekV4Config(
        vocab_size=c.n_vocab, hidden_size=c.n_embd, moe_intermediate_size=c.n_ff, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        head_dim=c.head_dim, q_lora_rank=c.q_lora_rank, num_experts_per_tok=c.n_expert_used, n_routed_experts=c.n_expert,
        routed_scaling_factor=c.expert_scale, max_position_embeddings=c.n_ctx_train, rope_theta=c.rope_base,
        compress_rope_theta=c.rope_base_compressed, layer_types=[LAYER_TYPES[ratio] for ratio in c.compress_ratios],
        mlp_layer_types=["hash_moe" if n < c.n_hash_layer else "moe" for n in range(c.n_layer)], hc_mult=c.n_hc,
        hc_sinkhorn_iters=c.hc_sinkhorn_iters, hc_eps=c.hc_eps, swiglu_limit=c.swiglu_clamp[0], sliding_window=c.n_window,
        o_groups=c.n_out_group, o_lora_rank=c.o_lora_rank, index_n_heads=c.n_index_head, index_head_dim=c.index_dim,
        index_topk=c.index_top_k, num_nextn_predict_layers=0, rms_norm_eps=c.rms_eps, partial_rotary_factor=partial,
        qk_rope_head_dim=c.n_rot,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": c.rope_base, "partial_rotary_factor": partial}, "compress": compress,
        },
    )  # fmt: skip


def hf_weights(file: GGUFFile) -> Iterator[tuple[str, torch.Tensor]]:
    """Expand every tensor of the file under transformers' name for it."""
    for name, tensor in file.tensors.items():
        head, _, rest = name.partition(".")
        layer, _, suffix = rest.partition(".")
        if head != "blk":
            yield GLOBAL_NAMES[name], torch.from_numpy(np.array(tensor.values()))
        elif suffix == "ffn_gate_exps.weight":
            up = file.tensors[f"blk.{layer}.ffn_up_exps.weight"].values()
            yield f"model.layers.{layer}.mlp.experts.gate_up_proj", torch.from_numpy(np.concatenate([tensor.values(), up], axis=1))
        elif suffix == "exp_probs_b.bias" and int(layer) < file.config.n_hash_layer:
            continue  # has no effect there
        elif suffix != "ffn_up_exps.weight":
            yield f"model.layers.{layer}.{LAYER_NAMES[suffix]}", torch.from_numpy(np.array(tensor.values()))


def build(file: GGUFFile) -> DeepseekV4ForCausalLM:
    """Make transformers' model with the file's weights. Every parameter and buffer of it must come from the file."""
    model = DeepseekV4ForCausalLM._from_config(hf_config(file.config), attn_implementation="eager", experts_implementation="eager")
    found = model.load_state_dict(dict(hf_weights(file)), strict=False)
    missing = [name for name in found.missing_keys if "rotary" not in name and not name.endswith("inv_freq")]
    if missing or found.unexpected_keys:
        raise SystemExit(f"weights do not match: missing {missing}, unexpected {found.unexpected_keys}")
    return model.eval().float()


@torch.inference_mode()
def decode_ms(model: DeepseekV4ForCausalLM, prompt: list[int], n_tokens: int) -> float:
    """Return the median milliseconds of a token, decoded greedily one by one with the cache."""
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    times = []
    for _ in range(n_tokens):
        token = out.logits[:, -1:].argmax(-1)
        started = time.perf_counter()
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        times.append(1000 * (time.perf_counter() - started))
    return median(times)


@torch.inference_mode()
def largest_difference(model: DeepseekV4ForCausalLM, path: Path, prompt: list[int]) -> float:
    """Compare the logits of both after every token of a prompt."""
    theirs = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    ours = ds4jax.load_model(path, kv_quant="none", dtype="float32").logits(prompt)
    return float(np.abs(ours - theirs).max())


def our_ms(path: Path, n_live: int, n_tokens: int) -> float:
    """Return the median milliseconds of a step of one session, as `ds4jax bench decode` measures it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "decode.csv"
        options = f"--buckets 1 --batched-session 1 --ctx 1024 --kv-quant none --dtype float32 --live {n_live} --steps {n_tokens}"
        command = [sys.executable, "-m", "ds4jax.cli", "bench", "decode", "-m", str(path), *options.split(), "--csv", str(result)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with result.open(newline="") as file:
            return float(next(csv.DictReader(file))["ms_median"])


def main() -> None:
    """Check, measure, and print the ratio."""
    parser = argparse.ArgumentParser(description="Compare single-stream decoding with transformers on the same weights.")
    parser.add_argument("model", type=Path, help="a small GGUF file")
    parser.add_argument("--prompt", type=int, default=32, help="tokens before the first one that is timed")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to time")
    parser.add_argument("--csv", type=Path, help="append the result to this file")
    arguments = parser.parse_args()

    file = GGUFFile(arguments.model)
    model = build(file)
    prompt = np.random.default_rng(0).integers(0, file.config.n_vocab, arguments.prompt).tolist()
    difference = largest_difference(model, arguments.model, prompt)
    print(f"largest difference of any logit: {difference:.1e}")
    if not difference <= TOLERANCE:
        raise SystemExit(f"the logits differ by more than {TOLERANCE}: the two do not run the same model")

    by_threads: dict[int, float] = {}
    for n_threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(n_threads)
        decode_ms(model, prompt, 8)
        by_threads[n_threads] = decode_ms(model, prompt, arguments.tokens)
    n_threads, theirs = min(by_threads.items(), key=lambda item: item[1])
    ours = our_ms(arguments.model, arguments.prompt, arguments.tokens)
    row: dict[str, Any] = {
        **origin(device_name()), "model": file.config.name, "prompt": arguments.prompt, "tokens": arguments.tokens,
        "logit_difference": f"{difference:.1e}", "transformers_threads": n_threads, "transformers_ms": theirs, "ds4jax_ms": ours,
        "ratio": theirs / ours,
    }  # fmt: skip
    print_table("single stream, ms a token", [row], ("transformers_threads", "transformers_ms", "ds4jax_ms", "ratio"))
    print(f"bar {BAR:g}x: {'met' if theirs / ours >= BAR else 'missed'}; transformers by threads: {by_threads}")
    if arguments.csv:
        append_csv(arguments.csv, [row])


if __name__ == "__main__":
    main()
