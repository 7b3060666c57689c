"""The shape that is trained for the package, and one that a test can train."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ds4jax.config import FLASH, ModelConfig

N_VOCAB = 4096

# Every kind of layer, in 17 to 20 MB as Q8_0, in sizes that the kernels for a GPU take and that ds4's row formats hold.
SMALL = replace(
    FLASH, name="ds4jax small", n_ctx_train=32768, n_layer=8, n_embd=256, n_vocab=N_VOCAB, n_head=8, head_dim=128, n_rot=64,
    q_lora_rank=128, o_lora_rank=128, n_out_group=2, n_window=128, compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128), n_hash_layer=2,
    n_index_head=4, index_top_k=256, n_expert=10, n_expert_used=3, n_ff=128, swiglu_clamp=(10.0,) * 8, swiglu_clamp_shared=(10.0,) * 8,
)  # fmt: skip

SMOKE = replace(
    SMALL, name="ds4jax smoke", n_layer=3, n_embd=64, n_head=2, q_lora_rank=32, o_lora_rank=32, compress_ratios=(0, 4, 128), n_hash_layer=1,
    n_index_head=2, n_expert=4, n_expert_used=2, n_ff=32, swiglu_clamp=(10.0,) * 3, swiglu_clamp_shared=(10.0,) * 3,
)  # fmt: skip


@dataclass(frozen=True)
class PlainShape:
    """The shape of a plain transformer: rotary attention over everything, SwiGLU, norms before blocks."""

    n_layer: int
    n_embd: int
    n_head: int
    n_ff: int
    n_vocab: int


# Of about as many parameters as SMALL, and SMOKE.
PLAIN = PlainShape(n_layer=8, n_embd=320, n_head=5, n_ff=1152, n_vocab=N_VOCAB)
PLAIN_SMOKE = PlainShape(n_layer=2, n_embd=64, n_head=2, n_ff=128, n_vocab=N_VOCAB)


def shapes_of(name: str) -> tuple[ModelConfig, PlainShape]:
    """Return (our model's shape, the plain one beside it) for "small" or "smoke"."""
    return {"small": (SMALL, PLAIN), "smoke": (SMOKE, PLAIN_SMOKE)}[name]
