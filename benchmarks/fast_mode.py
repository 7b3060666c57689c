"""Measure how right the fast mode is on this machine's device: bfloat16, on kernels where there are any.

    python -m benchmarks.fast_mode [--only oracle|kl|company] [--model FILE.gguf | --random flash-q2 [--layers N]] [--csv FILE]

- oracle: the largest difference of any logit between float32 and the reference logits in tests/fixtures/oracle.
- kl: the mean KL divergence of the fast mode's logits from float32's, for prompts in chunks and for decode steps, beside that of float32
  with the activations of every product of packed weights rounded to int8, as ds4 has them. On random weights of a small shape that the
  kernels take: with nothing chosen by score, so that no early difference sends a token elsewhere, and with every kind of layer.
- company: rows whose logits have other bits beside other neighbours and at other places of one bucket (there should be none); and
  greedy texts that are not the same in each bucket as in the first, and where they part. On that shape and the small model of the
  package, or on the model that is named.

Everything is made from seeds; float32 runs on the same device, in plain array code.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.company import Company, random_prompts, text_prompts
from benchmarks.int8 import int8_activations
from ds4jax.cli.bench import parse_counts
from ds4jax.cli.bench_report import append_csv, origin, print_table
from ds4jax.cli.console import note
from ds4jax.cli.loading import Numerics, open_model
from ds4jax.config import FLASH, ModelConfig
from ds4jax.errors import ConfigError
from ds4jax.model.cache import KVCache, init_cache
from ds4jax.model.gguf.random_leaves import random_leaves, random_spec
from ds4jax.model.model import load_model
from ds4jax.model.spec import FlatModel, ModelSpec
from ds4jax.model.steps import DecodeBatch, PrefillBatch, decode_step, prefill_all_logits
from ds4jax.packaged import small_model
from ds4jax.serving.engine.bench import device_name
from ds4jax.text import stop_ids

ORACLE = Path(__file__).parents[1] / "tests" / "fixtures" / "oracle"
QUANT = "q2"
CHOOSING = replace(
    FLASH, name="random", n_layer=5, n_embd=512, n_vocab=1024, n_head=16, head_dim=128, q_lora_rank=256,
    o_lora_rank=128, n_out_group=2, n_window=64, compress_ratios=(0, 4, 128, 4, 128), n_index_head=16, index_top_k=16, n_expert=16,
    n_expert_used=2, n_ff=512, swiglu_clamp=(10.0,) * 5, swiglu_clamp_shared=(10.0,) * 5, n_hash_layer=1,
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is measured. tokens: of the sequence for kl; chunk: of its prefill; prompts, new: texts, and the tokens of each."""

    tokens: int
    chunk: int
    prompts: int
    new: int
    buckets: tuple[int, ...]


def without_choices(config: ModelConfig) -> ModelConfig:
    """Let token ids choose all experts, and every compressed row be seen."""
    return replace(config, name="random, no choices", n_hash_layer=config.n_layer, index_top_k=512)


def arithmetic(spec: ModelSpec) -> str:
    """Name how a model computes."""
    return f"{spec.dtype}, kernels" if spec.kernels else f"{spec.dtype}, no kernels"


def result(model: str, how: str, what: str, value: float, of: int, bucket: int | str = "") -> dict[str, Any]:
    """Put one number down: the largest, the mean or the count of so many, or a token of so many."""
    return {"model": model, "arithmetic": how, "what": what, "bucket": bucket, "value": value, "of": of}


def against_oracle(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Compare float32 with each file's reference logits."""
    for file in files:
        model = load_model(file, kv_quant="none", dtype="float32")
        with np.load(file.with_suffix(".npz")) as known:
            runs = [name.removesuffix("_logits") for name in known if name.endswith("_logits")]
            wrong = [
                np.abs(model.logits(known[f"{run}_tokens"].tolist())[known[f"{run}_positions"]] - known[f"{run}_logits"]) for run in runs
            ]
        differences = np.concatenate([one.ravel() for one in wrong])
        yield result(file.stem, "float32", "oracle: largest difference", float(differences.max()), differences.size)


def divergence(config: ModelConfig, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Compare the fast mode's logits after every token with float32's, on random weights."""
    tokens = np.random.default_rng(0).integers(0, config.n_vocab, sizes.tokens).astype(np.int32)
    plain, fast = (random_spec(config, QUANT, "ds4", dtype) for dtype in ("float32", "bfloat16"))
    weights, fast_weights = random_leaves(plain, QUANT), random_leaves(fast, QUANT)
    right = in_chunks(weights, plain, tokens, sizes.chunk)
    with int8_activations():
        rounded = in_chunks(weights, plain, tokens, sizes.chunk)
    for how, what, logits in (
        ("float32, int8 rows", "prefill", rounded),
        (arithmetic(fast), "prefill", in_chunks(fast_weights, fast, tokens, sizes.chunk)),
        (arithmetic(fast), "decode", in_steps(fast_weights, fast, tokens)),
    ):
        yield result(config.name, how, f"KL: {what}", float(kl(right, logits).mean()), sizes.tokens)


def in_chunks(flat: FlatModel, spec: ModelSpec, tokens: np.ndarray, chunk: int) -> np.ndarray:
    """Feed tokens int32 [T] in chunks: logits f32 [T, V]."""

    def advance(leaves: Sequence[jax.Array], cache: KVCache, batch: PrefillBatch) -> tuple[jax.Array, KVCache]:
        return prefill_all_logits(flat.merge(leaves), cache, batch, spec.compute)

    program, cache, out = jax.jit(advance, donate_argnums=1), _empty(spec, len(tokens)), []
    for first in range(0, len(tokens), chunk):
        piece = tokens[first : first + chunk]
        padded = np.pad(piece, (0, chunk - len(piece)))[None]
        batch = PrefillBatch(jnp.asarray(padded), jnp.zeros(1, jnp.int32), jnp.full(1, len(piece), jnp.int32))
        logits, cache = program(flat.leaves, cache, batch)
        out.append(np.asarray(logits[0, : len(piece)]))
    return np.concatenate(out)


def in_steps(flat: FlatModel, spec: ModelSpec, tokens: np.ndarray) -> np.ndarray:
    """Feed tokens int32 [T] one by one: logits f32 [T, V]."""

    @jax.jit
    def run(leaves: Sequence[jax.Array], cache: KVCache, tokens: jax.Array) -> jax.Array:
        def step(cache: KVCache, token: jax.Array) -> tuple[KVCache, jax.Array]:
            logits, cache = decode_step(flat.merge(leaves), cache, DecodeBatch(token[None], jnp.zeros(1, jnp.int32)), spec.compute)
            return cache, logits[0]

        return jax.lax.scan(step, cache, tokens)[1]

    return np.asarray(run(flat.leaves, _empty(spec, len(tokens)), jnp.asarray(tokens)))


def _empty(spec: ModelSpec, n_tokens: int) -> KVCache:
    return jax.jit(partial(init_cache, spec.config, 1, 1024 * -(-n_tokens // 1024), spec.kv_quant, spec.dtype))()


def kl(right: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Compute the KL divergence of the distributions with logits `other` [T, V] from those of `right`: [T], in nats."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (right.astype(np.float64), other.astype(np.float64)))
    return (np.exp(p) * (p - q)).sum(axis=-1)


def in_company(model: str, company: Company, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Compare what each row computes in each bucket, beside other rows, and in other buckets."""
    how, alone = arithmetic(company.spec), None
    for bucket in sizes.buckets:
        texts = company.run(bucket)
        if bucket > 1:
            n_other = company.count_other_bits(bucket, texts)
            yield result(model, how, "rows with other bits", n_other, bucket, bucket)
        if alone is None:
            alone = texts
            continue
        parted = sorted(int(np.flatnonzero(differs)[0]) for differs in texts.tokens != alone.tokens if differs.any())
        yield result(model, how, "texts that part", len(parted), sizes.prompts, bucket)
        if parted:
            yield result(model, how, "first token that differs", parted[0], sizes.new, bucket)
            yield result(model, how, "the same, median", float(np.median(parted)), sizes.new, bucket)


def companies(options: argparse.Namespace, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Compare in company what is named, or the random shape and the small model."""
    if options.model is None and options.random is None:
        spec = random_spec(CHOOSING, QUANT, "ds4", "bfloat16")
        company = Company(spec, random_leaves(spec, QUANT), random_prompts(CHOOSING.n_vocab, sizes.prompts), sizes.new)
        yield from in_company(CHOOSING.name, company, sizes)
    path = None if options.random else options.model or small_model()
    model = open_model(path, options.random, options.layers, Numerics("auto", "bfloat16"))
    if options.random:
        company = Company(model.spec, model.flat, random_prompts(model.config.n_vocab, sizes.prompts), sizes.new)
    else:
        stops = stop_ids(model.tokenizer, thinking=False)
        company = Company(model.spec, model.flat, text_prompts(model.tokenizer, sizes.prompts), sizes.new, stops)
    yield from in_company(model.config.name, company, sizes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and append to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("oracle", "kl", "company"), action="append")
    parser.add_argument("--model", type=Path, default=None, help="for company")
    parser.add_argument("--random", default=None, help="for company: random weights, of tiny-q8, flash-q2, ...")
    parser.add_argument("--layers", type=int, default=None, help="only the first so many of --random")
    parser.add_argument("--tokens", type=int, default=300, help="of the sequence for kl")
    parser.add_argument("--chunk", type=int, default=150, help="of its prefill")
    parser.add_argument("--prompts", type=int, default=100, help="for company")
    parser.add_argument("--new", type=int, default=200, help="tokens of each text for company")
    parser.add_argument("--buckets", default="1,4,16,64", help="for company; all are compared with the first")
    parser.add_argument("--csv", type=Path, default=None)
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    command = {"command": shlex.join(["python", "-m", "benchmarks.fast_mode", *arguments])}
    try:
        sizes = Sizes(options.tokens, options.chunk, options.prompts, options.new, parse_counts("--buckets", options.buckets))
        sources = {
            "oracle": against_oracle(sorted(ORACLE.glob("*.gguf"))),
            "kl": chain(divergence(without_choices(CHOOSING), sizes), divergence(CHOOSING, sizes)),
            "company": companies(options, sizes),
        }
        rows = []
        for row in chain.from_iterable(sources[what] for what in options.only or sources):
            rows.append(row)
            note(", ".join(f"{name} {value}" for name, value in row.items()))
            if options.csv is not None:  # at once: a run that is stopped has measured what it has measured
                append_csv(options.csv, [origin(device_name()) | row | command])
    except ConfigError as error:
        parser.error(str(error))
    print_table(f"right answers on {device_name()}", rows, list(rows[0]))


if __name__ == "__main__":
    main()
