"""The tensors of a ds4 file: names, shapes and types, in file order, and how widely random weights for each should spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds4jax.config import ModelConfig
from ds4jax.errors import ConfigError

# quant -> (type of the experts' gate and up, type of their down)
EXPERT_KINDS = {"q2": ("IQ2_XXS", "Q2_K"), "q4": ("Q4_K", "Q4_K"), "q8": ("Q8_0", "Q8_0")}
DENSE_KIND = "Q8_0"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: shape is logical ([out, in], NumPy order); kind a GGML type name; mean and std of random values for it."""

    name: str
    shape: tuple[int, ...]
    kind: str
    std: float
    mean: float = 0.0


def ds4_tensors(config: ModelConfig, quant: str) -> Iterator[TensorSpec]:
    """List the tensors of a file in ds4's layout.

    Args:
        quant: "q2", "q4" or "q8", the type of the routed experts; all else is the same in each.

    Raises ConfigError for a quant that does not exist.
    """
    if quant not in EXPERT_KINDS:
        raise ConfigError(f"quant: got {quant!r}, expected one of {', '.join(EXPERT_KINDS)}")
    D, V, H = config.n_embd, config.n_vocab, config.n_hc
    yield TensorSpec("token_embd.weight", (V, D), "F16", 1.0)
    yield TensorSpec("output_hc_base.weight", (H,), "F32", 0.5)
    yield _matrix("output_hc_fn.weight", (H, H * D), "F16")
    yield _near_one("output_hc_scale.weight", 1)
    yield _near_one("output_norm.weight", D)
    yield _matrix("output.weight", (V, D), DENSE_KIND, gain=2.5)
    for layer in range(config.n_layer):
        for spec in (
            *_hyper(config, "attn"),
            *_attention(config),
            *_compressor(config, config.compress_ratios[layer]),
            *_hyper(config, "ffn"),
            *_feed_forward(config, layer, *EXPERT_KINDS[quant]),
        ):
            yield TensorSpec(f"blk.{layer}.{spec.name}", spec.shape, spec.kind, spec.std, spec.mean)


def _matrix(name: str, shape: tuple[int, ...], kind: str, gain: float = 1.0) -> TensorSpec:
    """A matrix [.., out, in] whose products with unit-variance inputs have standard deviation `gain`."""
    return TensorSpec(name, shape, kind, gain * shape[-1] ** -0.5)


def _near_one(name: str, n: int) -> TensorSpec:
    return TensorSpec(name, (n,), "F32", 0.25, mean=1.0)


def _hyper(config: ModelConfig, part: str) -> Iterator[TensorSpec]:
    n_mix = 2 * config.n_hc + config.n_hc**2  # pre, post and the H x H combination
    yield _matrix(f"hc_{part}_fn.weight", (n_mix, config.n_hc * config.n_embd), "F16")
    yield _near_one(f"hc_{part}_scale.weight", 3)
    yield TensorSpec(f"hc_{part}_base.weight", (n_mix,), "F32", 0.5)


def _attention(config: ModelConfig) -> Iterator[TensorSpec]:
    D, Q, K = config.n_embd, config.q_lora_rank, config.head_dim
    group_width = config.n_head * K // config.n_out_group
    n_low_rank = config.n_out_group * config.o_lora_rank
    yield _near_one("attn_norm.weight", D)
    yield _matrix("attn_q_a.weight", (Q, D), DENSE_KIND)
    yield _near_one("attn_q_a_norm.weight", Q)
    yield _matrix("attn_q_b.weight", (config.n_head * K, Q), DENSE_KIND)
    yield _matrix("attn_kv.weight", (K, D), DENSE_KIND)
    yield _near_one("attn_kv_a_norm.weight", K)
    yield TensorSpec("attn_sinks.weight", (config.n_head,), "F32", 1.0)
    yield _matrix("attn_output_a.weight", (n_low_rank, group_width), DENSE_KIND, gain=2.0)
    yield _matrix("attn_output_b.weight", (D, n_low_rank), DENSE_KIND, gain=1.5)


def _compressor(config: ModelConfig, ratio: int) -> Iterator[TensorSpec]:
    """Nothing for ratio 0. Ratio 4 pools overlapping windows, hence two series of columns, and has an indexer."""
    if ratio == 0:
        return
    D, K, J = config.n_embd, config.head_dim, config.index_dim
    n_series = 2 if ratio == 4 else 1
    yield TensorSpec("attn_compressor_ape.weight", (ratio, n_series * K), "F16", 0.7)
    yield _matrix("attn_compressor_kv.weight", (n_series * K, D), "F16")
    yield _matrix("attn_compressor_gate.weight", (n_series * K, D), "F16")
    yield _near_one("attn_compressor_norm.weight", K)
    if ratio == 4:
        yield _matrix("indexer.attn_q_b.weight", (config.n_index_head * J, config.q_lora_rank), "F16")
        yield _matrix("indexer.proj.weight", (config.n_index_head, D), "F16")
        yield TensorSpec("indexer_compressor_ape.weight", (4, 2 * J), "F16", 0.7)
        yield _matrix("indexer_compressor_kv.weight", (2 * J, D), "F16")
        yield _matrix("indexer_compressor_gate.weight", (2 * J, D), "F16")
        yield _near_one("indexer_compressor_norm.weight", J)


def _feed_forward(config: ModelConfig, layer: int, gate_kind: str, down_kind: str) -> Iterator[TensorSpec]:
    """Gains: SwiGLU multiplies two products of about 4, and the down projection brings them back to the size of the streams."""
    D, E, F = config.n_embd, config.n_expert, config.n_ff
    yield _near_one("ffn_norm.weight", D)
    yield _matrix("ffn_gate_inp.weight", (E, D), "F16", gain=1.5)
    yield _matrix("ffn_gate_exps.weight", (E, F, D), gate_kind, gain=4.0)
    yield _matrix("ffn_up_exps.weight", (E, F, D), gate_kind, gain=4.0)
    yield _matrix("ffn_down_exps.weight", (E, D, F), down_kind, gain=0.12)
    yield _matrix("ffn_gate_shexp.weight", (F, D), DENSE_KIND, gain=4.0)
    yield _matrix("ffn_up_shexp.weight", (F, D), DENSE_KIND, gain=4.0)
    yield _matrix("ffn_down_shexp.weight", (D, F), DENSE_KIND, gain=0.12)
    if layer < config.n_hash_layer:
        yield TensorSpec("ffn_gate_tid2eid.weight", (config.n_vocab, config.n_expert_used), "I32", 0.0)
    else:
        yield TensorSpec("exp_probs_b.bias", (E,), "F32", 0.2)
