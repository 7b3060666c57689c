"""Run greedy texts in buckets of several sizes, to compare what rows compute beside others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.evals.dialogues import story_request
from ds4jax.model.cache import KVCache, init_cache
from ds4jax.model.spec import FlatModel, ModelSpec
from ds4jax.model.steps import DecodeBatch, decode_step
from ds4jax.text import Message, Tokenizer, render, to_ids

SHORTEST, LONGEST = 4, 64  # tokens of a random prompt


def random_prompts(n_vocab: int, n: int) -> list[np.ndarray]:
    """Make n prompts of random tokens, of different lengths."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, n_vocab, length).astype(np.int32) for length in rng.integers(SHORTEST, LONGEST, n)]


def text_prompts(tokenizer: Tokenizer, n: int) -> list[np.ndarray]:
    """Ask for n different stories, as a chat does."""
    rng, requests = Random(1), set[str]()
    while len(requests) < n:
        requests.add(story_request(rng, held_out=True))
    chats = [render((Message("user", request),), thinking=False) for request in sorted(requests)]
    return [np.asarray(to_ids(chat, tokenizer), np.int32) for chat in chats]


@dataclass(frozen=True)
class Texts:
    """What rows computed.

    tokens: int32 [N, new], drawn behind each prompt, -1 behind one that ends the text. bits: int32 [N, steps], a sum over the bits of all
    logits of a step.
    """

    tokens: np.ndarray
    bits: np.ndarray


class Company:
    """A model, and prompts for it that go in as decode steps, one token a row, like the tokens that are drawn behind them.

    stops: tokens that end a text.
    """

    def __init__(self, spec: ModelSpec, flat: FlatModel, prompts: Sequence[np.ndarray], n_new: int, stops: Collection[int] = ()) -> None:
        self.spec, self._flat, self._n_new, self._stops = spec, flat, n_new, list(stops)
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        self._prompts = np.stack([np.pad(prompt, (0, self._lengths.max() - len(prompt))) for prompt in prompts])
        self._program = cache(self._compile)

    def run(self, bucket: int) -> Texts:
        """Run all prompts in their order, so many at a time; the last ones beside the first again."""
        n = len(self._lengths)
        parts = [self._run(bucket, np.arange(first, first + bucket) % n) for first in range(0, n, bucket)]
        return Texts(*(np.concatenate([getattr(part, name) for part in parts])[:n] for name in ("tokens", "bits")))

    def count_other_bits(self, bucket: int, texts: Texts) -> int:
        """Count the rows of a bucket, filled anew in another order, with bits that are not those of `texts`, which ran in this bucket."""
        n = len(self._lengths)
        mixed = np.random.default_rng(bucket).permutation(max(n, bucket))[:bucket] % n
        return int((self._run(bucket, mixed).bits != texts.bits[mixed]).any(axis=1).sum())

    def _run(self, bucket: int, which: np.ndarray) -> Texts:
        lengths = self._lengths[which]
        drawn, bits = (np.asarray(a).T for a in self._program(bucket)(self._flat.leaves, self._prompts[which], lengths))
        tokens = np.stack([row[n - 1 : n - 1 + self._n_new] for row, n in zip(drawn, lengths, strict=True)])
        is_stop = np.isin(tokens, self._stops)
        return Texts(np.where(np.cumsum(is_stop, axis=1) - is_stop > 0, -1, tokens), bits)

    def _compile(self, bucket: int) -> Any:
        config, compute, width = self.spec.config, self.spec.compute, self._prompts.shape[1]
        n_steps = width + self._n_new - 1
        n_ctx = max(512, 1 << n_steps.bit_length())

        @jax.jit
        def run(leaves: Sequence[jax.Array], prompt: jax.Array, n: jax.Array) -> Any:
            model, slot = self._flat.merge(leaves), jnp.arange(bucket, dtype=jnp.int32)

            def step(carry: tuple[KVCache, jax.Array], i: jax.Array) -> Any:
                cache, drawn = carry
                token = jnp.where(i < n, prompt[:, jnp.minimum(i, width - 1)], drawn)
                logits, cache = decode_step(model, cache, DecodeBatch(token, slot), compute)
                drawn = jnp.argmax(logits, axis=-1).astype(jnp.int32)
                bits = jnp.sum(jax.lax.bitcast_convert_type(logits, jnp.int32), axis=-1, dtype=jnp.int32)
                return (cache, drawn), (drawn, bits)

            empty = init_cache(config, bucket, n_ctx, self.spec.kv_quant, self.spec.dtype)
            return jax.lax.scan(step, (empty, jnp.zeros(bucket, jnp.int32)), jnp.arange(n_steps))[1]

        return run
