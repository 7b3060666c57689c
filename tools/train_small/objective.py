"""What training minimises: the cross entropy of the assistant's tokens, and a little of everybody else's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ds4jax.text.special import ASSISTANT, BOS, EOS, USER
from ds4jax.text.vocabulary import Vocabulary

PROMPT_WEIGHT = 0.1
INDEX_WEIGHT = 0.05
EXCESS_WEIGHT = 1e-3


@dataclass(frozen=True)
class Marks:
    """The tokens that part a conversation."""

    bos: int
    eos: int
    user: int
    assistant: int
    pad: int

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Marks:
        """Find them in a vocabulary."""
        return cls(*(vocabulary.id_of[literal] for literal in (BOS, EOS, USER, ASSISTANT, "<｜▁pad▁｜>")))


def starts(token: jax.Array, marks: Marks) -> jax.Array:
    """Find where each token's conversation begins: int32, shape of token [B, T]."""
    return _last(token == marks.bos)


def _last(is_mark: jax.Array) -> jax.Array:
    """Position of the last mark up to each token, 0 where there is none yet."""
    position = jnp.arange(is_mark.shape[1], dtype=jnp.int32)[None, :]
    return jax.lax.cummax(jnp.where(is_mark, position, 0), axis=1)


def target_weights(token: jax.Array, marks: Marks) -> tuple[jax.Array, jax.Array]:
    """Weigh the prediction of each next token, f32 [B, T - 1]: (for training, for measuring).

    1 for what the assistant writes, its end of turn included; PROMPT_WEIGHT (0 when measuring) for other text; 0 for what begins another
    conversation or fills up a window.
    """
    now, following = token[:, :-1], token[:, 1:]
    others = (now == marks.bos) | (now == marks.user) | (now == marks.eos) | (now == marks.pad)
    by_assistant = _last(now == marks.assistant) > _last(others)
    counts = (following != marks.bos) & (following != marks.pad)
    return jnp.where(counts, jnp.where(by_assistant, 1.0, PROMPT_WEIGHT), 0.0), (counts & by_assistant).astype(jnp.float32)


def cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    """Return -log p of targets [...] under logits [..., V]: f32 [...]."""
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def mean_loss(logits: jax.Array, token: jax.Array, weight: jax.Array) -> jax.Array:
    """Average the cross entropy of the next tokens. logits: [B, T, V]; token: [B, T]; weight: [B, T - 1]."""
    return jnp.sum(cross_entropy(logits[:, :-1], token[:, 1:]) * weight) / jnp.maximum(jnp.sum(weight), 1.0)


def measure(logits_of: Callable[[jax.Array], jax.Array], token: jax.Array, marks: Marks) -> tuple[jax.Array, jax.Array]:
    """Sum the cross entropy of the assistant's tokens, and count them."""
    weight = target_weights(token, marks)[1]
    return jnp.sum(cross_entropy(logits_of(token)[:, :-1], token[:, 1:]) * weight), jnp.sum(weight)
