"""Configurations: of the model (read from GGUF metadata, checked, frozen), the engine, its disk and the server. Plain values only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ds4jax.errors import ConfigError

ARCHITECTURE = "deepseek4"
COMPRESS_RATIOS = (0, 4, 128)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one DeepSeek V4 model. Names follow the GGUF keys; sizes are in values, not bytes.

    n_embd: hidden size D; n_hc: hyper-connection streams H; head_dim: K of keys and values alike, of which the last
    n_rot channels rotate; n_out_group groups of heads share an output projection of o_lora_rank rows;
    compress_ratios: per layer 0 (window only), 4 (compressed rows chosen by the indexer) or 128 (all compressed rows);
    the first n_hash_layer layers choose experts by token id.
    """

    name: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_head: int
    head_dim: int
    n_rot: int
    q_lora_rank: int
    o_lora_rank: int
    n_out_group: int
    n_window: int
    compress_ratios: tuple[int, ...]
    n_index_head: int
    index_dim: int
    index_top_k: int
    rope_base: float
    rope_base_compressed: float
    yarn_factor: float
    yarn_original_ctx: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    rms_eps: float
    n_expert: int
    n_expert_used: int
    n_ff: int
    expert_scale: float
    n_hash_layer: int
    swiglu_clamp: tuple[float, ...]
    swiglu_clamp_shared: tuple[float, ...]
    n_hc: int
    hc_sinkhorn_iters: int
    hc_eps: float

    def __post_init__(self) -> None:
        for field_name in ("compress_ratios", "swiglu_clamp", "swiglu_clamp_shared"):
            n = len(getattr(self, field_name))
            if n != self.n_layer:
                raise ConfigError(f"{field_name}: got {n} entries, expected one for each of {self.n_layer} layers")
        for layer, ratio in enumerate(self.compress_ratios):
            if ratio not in COMPRESS_RATIOS:
                raise ConfigError(f"attention.compress_ratios: layer {layer} has {ratio}, expected one of {COMPRESS_RATIOS}")
        if self.n_rot % 2 or self.n_rot > self.head_dim or self.n_rot > self.index_dim:
            raise ConfigError(f"rope.dimension_count: got {self.n_rot}, expected an even number up to key_length {self.head_dim}")
        if self.n_head % self.n_out_group:
            raise ConfigError(f"attention.output_group_count: {self.n_out_group} groups do not divide {self.n_head} heads")
        if not 0 < self.n_expert_used <= self.n_expert:
            raise ConfigError(f"expert_used_count: got {self.n_expert_used}, expected 1 to {self.n_expert}")
        if self.n_hc < 1 or self.hc_sinkhorn_iters < 1:
            raise ConfigError("hyper_connection.count and .sinkhorn_iterations must be at least 1")

    @property
    def n_layer_ratio4(self) -> int:
        """Layers with the indexer."""
        return self.compress_ratios.count(4)

    @property
    def n_layer_ratio128(self) -> int:
        """Layers with one compressed row in 128 tokens."""
        return self.compress_ratios.count(128)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ModelConfig:
        """Read a model's shape from GGUF metadata (key -> Python value; any numeric type is taken).

        Raises ConfigError naming the key, what was found and what was expected.
        """
        architecture = metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise ConfigError(
                f"general.architecture: got {architecture!r}, expected {ARCHITECTURE!r}; only DeepSeek V4 files can be served"
            )
        n_layer = _number(metadata, "block_count", int)
        values: dict[str, Any] = {"name": str(metadata.get("general.name", ARCHITECTURE))}
        for field_name, (key, kind, default) in METADATA_KEYS.items():
            values[field_name] = _number(metadata, key, kind, default)
        clamp = _numbers(metadata, "swiglu_clamp_exp", float, n_layer)
        values |= {
            "compress_ratios": _numbers(metadata, "attention.compress_ratios", int, n_layer),
            "swiglu_clamp": clamp,
            "swiglu_clamp_shared": _numbers(metadata, "swiglu_clamp_shexp", float, n_layer, default=clamp),
        }
        _check_fixed(metadata)
        return cls(**values)


# field -> (GGUF key below "deepseek4.", type, default or None). Defaults stand only where ds4 itself does without the key.
METADATA_KEYS: dict[str, tuple[str, type, Any]] = {
    "n_layer": ("block_count", int, None),
    "n_ctx_train": ("context_length", int, 1 << 20),
    "n_embd": ("embedding_length", int, None),
    "n_vocab": ("vocab_size", int, None),
    "n_head": ("attention.head_count", int, None),
    "head_dim": ("attention.key_length", int, None),
    "n_rot": ("rope.dimension_count", int, None),
    "q_lora_rank": ("attention.q_lora_rank", int, None),
    "o_lora_rank": ("attention.output_lora_rank", int, None),
    "n_out_group": ("attention.output_group_count", int, None),
    "n_window": ("attention.sliding_window", int, None),
    "n_index_head": ("attention.indexer.head_count", int, None),
    "index_dim": ("attention.indexer.key_length", int, None),
    "index_top_k": ("attention.indexer.top_k", int, None),
    "rope_base": ("rope.freq_base", float, None),
    "rope_base_compressed": ("attention.compress_rope_freq_base", float, None),
    "yarn_factor": ("rope.scaling.factor", float, 16.0),
    "yarn_original_ctx": ("rope.scaling.original_context_length", int, 65536),
    "yarn_beta_fast": ("rope.scaling.yarn_beta_fast", float, 32.0),
    "yarn_beta_slow": ("rope.scaling.yarn_beta_slow", float, 1.0),
    "rms_eps": ("attention.layer_norm_rms_epsilon", float, None),
    "n_expert": ("expert_count", int, None),
    "n_expert_used": ("expert_used_count", int, None),
    "n_ff": ("expert_feed_forward_length", int, None),
    "expert_scale": ("expert_weights_scale", float, None),
    "n_hash_layer": ("hash_layer_count", int, None),
    "n_hc": ("hyper_connection.count", int, None),
    "hc_sinkhorn_iters": ("hyper_connection.sinkhorn_iterations", int, None),
    "hc_eps": ("hyper_connection.epsilon", float, None),
}

# Keys that may be absent; where present they must say what the arithmetic assumes.
_FIXED: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_gating_func": 4,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "rope.scaling.type": "yarn",
}


def _check_fixed(metadata: Mapping[str, Any]) -> None:
    """Reject files whose optional keys contradict what the model computes."""
    for key, expected in _FIXED.items():
        got = metadata.get(f"{ARCHITECTURE}.{key}", expected)
        if got != expected:
            raise ConfigError(f"{ARCHITECTURE}.{key}: got {got!r}, expected {expected!r}")
    key_length = metadata.get(f"{ARCHITECTURE}.attention.key_length")
    value_length = metadata.get(f"{ARCHITECTURE}.attention.value_length", key_length)
    if value_length != key_length:
        raise ConfigError(f"{ARCHITECTURE}.attention.value_length: got {value_length}, expected key_length {key_length}")


def _number(metadata: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """One numeric key, converted; bool is not a number here."""
    full = f"{ARCHITECTURE}.{key}"
    value = metadata.get(full, default)
    if value is None:
        raise ConfigError(f"{full}: the file lacks this key; expected a number. Is it a complete DeepSeek V4 GGUF?")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{full}: got {value!r}, expected a number")
    if kind is int and value != int(value):
        raise ConfigError(f"{full}: got {value!r}, expected a whole number")
    return kind(value)


def _numbers(metadata: Mapping[str, Any], key: str, kind: type, n: int, default: Sequence[Any] | None = None) -> tuple[Any, ...]:
    """The first n entries of an array key (files may carry one more for the MTP block)."""
    full = f"{ARCHITECTURE}.{key}"
    value = metadata.get(full, default)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value] * n
    if value is None or isinstance(value, (str, bytes)) or len(value) < n:
        got = "nothing" if value is None else f"{len(value)} entries"
        raise ConfigError(f"{full}: got {got}, expected at least {n}, one a layer")
    return tuple(kind(x) for x in value[:n])


def _flash_ratios() -> tuple[int, ...]:
    return (0, 0) + tuple(4 if layer % 2 == 0 else 128 for layer in range(2, 43))


def _pro_ratios() -> tuple[int, ...]:
    return (128, 128) + tuple(4 if layer % 2 == 0 else 128 for layer in range(2, 61))


_SHARED_SHAPE: dict[str, Any] = dict(
    n_ctx_train=1 << 20, n_vocab=129280, head_dim=512, n_rot=64, o_lora_rank=1024, n_window=128, n_index_head=64, index_dim=128,
    rope_base=10000.0, rope_base_compressed=160000.0, yarn_factor=16.0, yarn_original_ctx=65536, yarn_beta_fast=32.0, yarn_beta_slow=1.0,
    rms_eps=1e-6, n_expert_used=6, n_hash_layer=3, n_hc=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
)  # fmt: skip

FLASH = ModelConfig(
    name="DeepSeek V4 Flash", n_layer=43, n_embd=4096, n_head=64, q_lora_rank=1024, n_out_group=8, index_top_k=512, n_expert=256, n_ff=2048,
    expert_scale=1.5, compress_ratios=_flash_ratios(), swiglu_clamp=(10.0,) * 43, swiglu_clamp_shared=(10.0,) * 43, **_SHARED_SHAPE,
)  # fmt: skip

PRO = ModelConfig(
    name="DeepSeek V4 Pro", n_layer=61, n_embd=7168, n_head=128, q_lora_rank=1536, n_out_group=16, index_top_k=1024, n_expert=384,
    n_ff=3072,
    expert_scale=2.5, compress_ratios=_pro_ratios(), swiglu_clamp=(10.0,) * 61, swiglu_clamp_shared=(10.0,) * 61, **_SHARED_SHAPE,
)  # fmt: skip


def check_published_shape(config: ModelConfig, published: ModelConfig) -> None:
    """Compare a file that claims to be `published` with it, field by field.

    Raises ConfigError that lists every field that differs.
    """
    different = [
        f"{f.name}: got {getattr(config, f.name)}, expected {getattr(published, f.name)}"
        for f in fields(ModelConfig)
        if f.name != "name" and not _same(getattr(config, f.name), getattr(published, f.name))
    ]
    if different:
        raise ConfigError(f"the file says it is {published.name} but differs from it:\n  " + "\n  ".join(different))


def _same(a: Any, b: Any) -> bool:
    """Equal, where floats may have passed through float32."""
    if isinstance(a, float):
        return bool(abs(a - b) <= 1e-6 * abs(b))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is built for.

    slots: resident sessions; ctx: tokens a slot holds; coalesce_us: longest wait from the first pending row to the launch;
    prefill_quantum: tokens that a prefill launch may take, padding included;
    mixed_prefill_quantum: those that it may take of one prompt while somebody decodes;
    decode_steps_per_prefill: waiting prompts get a launch at least every so many decode steps;
    queue_limit: requests that may wait (None: 4 * slots);
    snapshots: states of slots that are kept to return to (None: 4 * slots; 0: none, and only whole histories are continued).
    """

    slots: int = 4
    ctx: int = 32768
    coalesce_us: int = 2000
    prefill_quantum: int = 2048
    mixed_prefill_quantum: int = 128
    decode_steps_per_prefill: int = 4
    queue_limit: int | None = None
    snapshots: int | None = None
    batch_log: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("slots", 1),
            ("ctx", 2),
            ("prefill_quantum", 1),
            ("mixed_prefill_quantum", 1),
            ("decode_steps_per_prefill", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected at least {least}")
        if not 0 <= self.coalesce_us <= 100_000:
            raise ConfigError(f"coalesce_us: got {self.coalesce_us}, expected 0 to 100000")
        if self.n_snapshots < 0:
            raise ConfigError(f"snapshots: got {self.snapshots}, expected 0 (none) or more")

    @property
    def max_waiting(self) -> int:
        """Requests that may wait for a slot."""
        return 4 * self.slots if self.queue_limit is None else self.queue_limit

    @property
    def n_snapshots(self) -> int:
        """Snapshots of slots that are kept at a time."""
        return 4 * self.slots if self.snapshots is None else self.snapshots


@dataclass(frozen=True)
class KVPolicy:
    """The knobs of `--kv-disk-space-mb` and `--kv-cache-*`, with ds4's defaults.

    space_mb: budget of the folder, MiB. min_tokens: shorter sessions are neither saved nor loaded. cold_max_tokens: longer prompts are
    not saved cold (0: none is). continued_interval_tokens: tokens between two saves of a session that goes on (0: none), rounded up
    to boundary_align_tokens. boundary_trim_tokens: the end of a cold prompt that may differ from prompt to prompt.
    """

    space_mb: int = 4096
    min_tokens: int = 512
    cold_max_tokens: int = 30_000
    continued_interval_tokens: int = 10_000
    boundary_trim_tokens: int = 32
    boundary_align_tokens: int = 2048

    def __post_init__(self) -> None:
        for name, least in (
            ("space_mb", 1),
            ("min_tokens", 1),
            ("cold_max_tokens", 0),
            ("continued_interval_tokens", 0),
            ("boundary_trim_tokens", 0),
            ("boundary_align_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{_flag(name)}: got {getattr(self, name)}, expected at least {least}")
        if 0 < self.cold_max_tokens < self.min_tokens:
            raise ConfigError(
                f"{_flag('cold_max_tokens')}: got {self.cold_max_tokens}, expected 0 (no cold saves) "
                f"or at least {_flag('min_tokens')} {self.min_tokens}"
            )

    @property
    def budget_bytes(self) -> int:
        """Size that the folder's entries never exceed together."""
        return self.space_mb << 20

    @property
    def continued_step(self) -> int:
        """Tokens between two continued saves; 0: there are none."""
        align = self.boundary_align_tokens
        return -(-self.continued_interval_tokens // align) * align


def _flag(name: str) -> str:
    return "--kv-disk-space-mb" if name == "space_mb" else f"--kv-cache-{name.replace('_', '-')}"


@dataclass(frozen=True)
class ServerConfig:
    """What the HTTP edge needs to know.

    model_id: the id that replies carry and /v1/models lists; aliases: further ids; default_max_tokens: completion length when a request
    names none; keepalive_s: seconds of silence in a stream before a comment is sent; body_limit_bytes: largest request body;
    tool_prompt: how the model is told of tools, with {tools} where they go; chat_template: the Jinja text that makes prompts (None: ours);
    api_keys: one of them must come with each request (none: the server is open); tool_memory_max_ids: calls of tools of which the very
    text is remembered, to be shown to the model again (0: none); trace: a file to which the whole text of every request is appended.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_id: str = "deepseek-v4-flash"
    aliases: tuple[str, ...] = ()
    strict_model: bool = False
    default_max_tokens: int = 393216
    cors: bool = False
    prompt_style: str = "deepseek"
    tool_prompt: str | None = None
    chat_template: str | None = None
    keepalive_s: float = 5.0
    body_limit_bytes: int = 64 << 20
    tool_memory_max_ids: int = 100_000
    trace: Path | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # a secret: it must not end up in a log


def cache_directory() -> Path:
    """Return the folder for files that can be made again: DS4JAX_CACHE_DIR, else ds4jax in the user's cache folder."""
    own = os.environ.get("DS4JAX_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds4jax"
