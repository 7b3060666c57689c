"""Write a model in ds4's file layout: with weights that were trained, or with random ones for tests and for measuring speed.

Tensors are made and written one by one, so the full Flash shape needs the memory of its largest tensor, not of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

from ds4jax.config import ARCHITECTURE, METADATA_KEYS, ModelConfig
from ds4jax.errors import ConfigError
from ds4jax.model.gguf.layout import TensorSpec, ds4_tensors
from ds4jax.model.gguf.random_blocks import block_size, random_blocks
from ds4jax.text.bpe import BYTE_OF_LETTER
from ds4jax.text.vocabulary import Vocabulary

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, tensor name

_PLAIN_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "I32": np.dtype(np.int32)}
_CHUNK_VALUES = 1 << 24  # float32 values drawn at a time for an F16 tensor
_UNREADABLE_STD = 0.05  # of the output rows of unreadable tokens, relative to the others: their logits stay near 0
_NORMAL = 1  # a value of tokenizer.ggml.token_type


def write_synthetic(
    path: str | os.PathLike[str],
    config: ModelConfig,
    quant: str,
    seed: int,
    vocabulary: Vocabulary,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF file with random weights; the same arguments give the same bytes.

    Args:
        config: the shape; rows of quantised tensors must be whole blocks (256 values for q2 and q4, 32 for q8 and dense).
        quant: "q2", "q4" or "q8": the type of the routed experts.
        vocabulary: of config.n_vocab tokens. Those that show nothing readable by themselves get small logits, so that what the
            model writes can be looked at.
        progress: called after each tensor.

    The file appears under its name when it is complete; until then it is `PATH.part`.
    Raises ConfigError for an impossible shape, and OSError (a full disk) after removing the part.
    """
    specs = _specs(config, quant, vocabulary)
    rng = np.random.default_rng(seed)
    _write(path, specs, to_metadata(config), vocabulary, lambda spec: _draw(rng, spec, config, vocabulary), progress)


def write_weights(
    path: str | os.PathLike[str],
    config: ModelConfig,
    quant: str,
    weights: Mapping[str, np.ndarray],
    vocabulary: Vocabulary,
    about: Mapping[str, str | list[str]] | None = None,
) -> None:
    """Write a GGUF file with given weights.

    Args:
        config, quant, vocabulary: as for `write_synthetic`; q8 is the only quant that can be made from given weights.
        weights: an array for each tensor of the layout, by name, in its logical shape; rounded to the tensor's type here.
        about: further metadata, such as "general.license".

    Raises ConfigError for a weight that is missing, of another shape, or not finite.
    """
    if quant != "q8":
        raise ConfigError(f"quant: got {quant!r}; given weights can only be written as q8")
    specs = _specs(config, quant, vocabulary)
    for spec in specs:
        given = weights.get(spec.name)
        if given is None or given.shape != spec.shape:
            raise ConfigError(f"{spec.name}: got {'nothing' if given is None else given.shape}, expected weights of shape {spec.shape}")
        if not np.isfinite(given).all():
            raise ConfigError(f"{spec.name}: some weights are not finite; did the training diverge?")
    _write(path, specs, to_metadata(config) | dict(about or {}), vocabulary, lambda spec: as_stored(spec, weights[spec.name]))


def as_stored(spec: TensorSpec, values: np.ndarray) -> np.ndarray:
    """Round values to a tensor's type: an array of that type, or the bytes of its blocks."""
    if spec.kind in _PLAIN_DTYPES:
        return values.astype(_PLAIN_DTYPES[spec.kind])
    return quants.quantize(values.astype(np.float32), GGMLQuantizationType[spec.kind])


def _specs(config: ModelConfig, quant: str, vocabulary: Vocabulary) -> list[TensorSpec]:
    """List a file's tensors. Raises ConfigError where its shape is impossible."""
    if len(vocabulary.tokens) != config.n_vocab:
        raise ConfigError(f"vocab_size: the configuration says {config.n_vocab}, the vocabulary has {len(vocabulary.tokens)} tokens")
    specs = list(ds4_tensors(config, quant))
    for spec in specs:
        _check_whole_blocks(spec)
    return specs


def _write(
    path: str | os.PathLike[str],
    specs: list[TensorSpec],
    metadata: dict[str, Any],
    vocabulary: Vocabulary,
    values_of: Callable[[TensorSpec], np.ndarray],
    progress: Progress | None = None,
) -> None:
    """Write header and tensors, asking for the values of each in file order."""
    part = Path(f"{os.fspath(path)}.part")
    writer = GGUFWriter(part, ARCHITECTURE)
    try:
        _add_metadata(writer, metadata, vocabulary)
        for spec in specs:
            _add_info(writer, spec)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(map(_size_bytes, specs))
        for spec in specs:
            writer.write_tensor_data(values_of(spec))
            done += _size_bytes(spec)
            if progress:
                progress(done, total, spec.name)
        writer.close()
        part.replace(path)
    except BaseException:
        writer.close()
        part.unlink(missing_ok=True)
        raise


def to_metadata(config: ModelConfig) -> dict[str, Any]:
    """Return the GGUF keys that describe a model, as ModelConfig.from_metadata reads them."""
    values = {key: getattr(config, field) for field, (key, _, _) in METADATA_KEYS.items()}
    values |= {
        "attention.head_count_kv": 1,
        "attention.value_length": config.head_dim,
        "attention.compress_ratios": list(config.compress_ratios),
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": list(config.swiglu_clamp),
    }
    if config.swiglu_clamp_shared != config.swiglu_clamp:
        values["swiglu_clamp_shexp"] = list(config.swiglu_clamp_shared)
    own = {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}
    return {"general.architecture": ARCHITECTURE, "general.name": config.name} | own


def _add_metadata(writer: GGUFWriter, metadata: dict[str, Any], vocabulary: Vocabulary) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    for key, value in metadata.items():
        if key != "general.architecture":  # the writer has added it
            add[type(value)](key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos_id)
    writer.add_eos_token_id(vocabulary.eos_id)


def _add_info(writer: GGUFWriter, spec: TensorSpec) -> None:
    """Announce a tensor: the writer wants the shape in bytes for quantised kinds."""
    kind = GGMLQuantizationType[spec.kind]
    if spec.kind in _PLAIN_DTYPES:
        writer.add_tensor_info(spec.name, spec.shape, _PLAIN_DTYPES[spec.kind], _size_bytes(spec), kind)
    else:
        values, size = block_size(spec.kind)
        byte_shape = (*spec.shape[:-1], spec.shape[-1] // values * size)
        writer.add_tensor_info(spec.name, byte_shape, np.dtype(np.uint8), _size_bytes(spec), kind)


def _size_bytes(spec: TensorSpec) -> int:
    values, size = block_size(spec.kind)
    return prod(spec.shape) // values * size


def _check_whole_blocks(spec: TensorSpec) -> None:
    values, _ = block_size(spec.kind)
    if spec.shape[-1] % values:
        raise ConfigError(
            f"{spec.name}: rows of {spec.shape[-1]} values cannot be stored as {spec.kind}, which needs a multiple of {values}. "
            "Choose another quant, or other sizes."
        )


def _draw(rng: np.random.Generator, spec: TensorSpec, config: ModelConfig, vocabulary: Vocabulary) -> np.ndarray:
    if spec.kind == "I32":
        return _draw_experts(rng, spec.shape, config.n_expert)
    if spec.kind in _PLAIN_DTYPES:
        return _draw_normal(rng, spec)
    std: float | np.ndarray = spec.std
    if spec.name == "output.weight":
        std = np.full(spec.shape[0], spec.std, np.float32)
        std[[not _is_readable(vocabulary, i) for i in range(spec.shape[0])]] *= _UNREADABLE_STD
    return random_blocks(rng, spec.kind, spec.shape, std)


def _is_readable(vocabulary: Vocabulary, i: int) -> bool:
    """Whether a token is text by itself; the end token counts, since a reply needs an end."""
    token = vocabulary.tokens[i]
    byte = BYTE_OF_LETTER.get(token)
    return i == vocabulary.eos_id or (vocabulary.types[i] == _NORMAL and (byte is None or byte == 0x0A or 0x20 <= byte < 0x7F))


def _draw_normal(rng: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    """Draw plain values, a chunk at a time; those around 1 (norms, scales) stay clear of 0."""
    values = np.empty(prod(spec.shape), _PLAIN_DTYPES[spec.kind])
    for start in range(0, len(values), _CHUNK_VALUES):
        chunk = values[start : start + _CHUNK_VALUES]
        chunk[:] = rng.standard_normal(len(chunk), np.float32) * spec.std + spec.mean
    if spec.mean:
        np.maximum(values, 0.25, out=values)
    return values.reshape(spec.shape)


def _draw_experts(rng: np.random.Generator, shape: tuple[int, ...], n_expert: int) -> np.ndarray:
    """Draw the table of hash-routed layers: distinct experts for each token. int32 [V, X]."""
    n_vocab, n_used = shape
    order = rng.random((n_vocab, n_expert), np.float32).argsort(axis=1)
    return np.ascontiguousarray(order[:, :n_used], np.int32)
