"""The two models that are trained, behind one face: first weights, loss of a batch, and what else a step changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ds4jax.config import ModelConfig
from tools.train_small.attend import Sequences
from tools.train_small.forward import hidden, logits
from tools.train_small.objective import EXCESS_WEIGHT, INDEX_WEIGHT, Marks, mean_loss, starts, target_weights
from tools.train_small.plain import begin_plain, plain_logits
from tools.train_small.shapes import PlainShape
from tools.train_small.weights import Weights, begin_weights, build_model

BALANCE_STEP = 1e-3  # of the router's biases, per training step


class Task(Protocol):
    """A model in training. Fixed weights get no gradients."""

    name: str

    def begin(self, seed: int) -> tuple[Weights, Weights]:
        """Return (trained weights, fixed weights)."""
        ...

    def loss(self, weights: Weights, fixed: Weights, token: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Weights]]:
        """Return what to minimise for tokens [B, T], then its cross entropy alone, and the fixed weights of the next step."""
        ...

    def logits(self, weights: Weights, fixed: Weights, token: jax.Array) -> jax.Array:
        """Return logits [B, T, V]."""
        ...


@dataclass(frozen=True)
class Ours:
    """Our own architecture. token_counts: see `begin_weights`."""

    config: ModelConfig
    marks: Marks
    dtype: jnp.dtype
    token_counts: np.ndarray
    name: str = "ours"

    def begin(self, seed: int) -> tuple[Weights, Weights]:
        return begin_weights(self.config, self.token_counts, seed)

    def loss(self, weights: Weights, fixed: Weights, token: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Weights]]:
        model = build_model(self.config, weights | fixed)
        y, report = hidden(model, token, Sequences(starts(token, self.marks), True, self._reach(token.shape[0])), self.dtype)
        text = mean_loss(logits(model, y, self.dtype), token, target_weights(token, self.marks)[0])
        aside = INDEX_WEIGHT * jnp.sum(report.index_loss) + EXCESS_WEIGHT * jnp.sum(report.excess)
        return text + aside, (text, self._balance(fixed, report.load))

    def _reach(self, n_row: int) -> jax.Array:
        """Let every other row of a batch see only some of its window, 8 tokens at least; the rest is there in compressed rows alone.

        With the whole window nearly all that matters is in it, and the model hardly learns to look beyond.
        """
        w, i = self.config.n_window, jnp.arange(n_row)
        fraction = (i // 2 % 8) / 8  # a row of a batch is a window drawn at random
        return jnp.where(i % 2 == 0, w, jnp.round(8 * (w / 8) ** fraction)).astype(jnp.int32)

    def _balance(self, fixed: Weights, load: jax.Array) -> Weights:
        """Make experts with less than their share a little more attractive, without a loss that would pull at the router."""
        moved = {}
        for name, value in fixed.items():
            if name.endswith("exp_probs_b.bias"):
                own = load[int(name.split(".")[1])]
                value = value + BALANCE_STEP * jnp.sign(jnp.mean(own) - own)
                moved[name] = value - jnp.mean(value)
        return fixed | moved

    def logits(self, weights: Weights, fixed: Weights, token: jax.Array) -> jax.Array:
        model = build_model(self.config, weights | fixed)
        y, _ = hidden(model, token, Sequences(starts(token, self.marks), True), self.dtype)
        return logits(model, y, self.dtype)


@dataclass(frozen=True)
class Plain:
    """The plain transformer beside it."""

    shape: PlainShape
    marks: Marks
    dtype: jnp.dtype
    name: str = "plain"

    def begin(self, seed: int) -> tuple[Weights, Weights]:
        return begin_plain(self.shape, seed), {}

    def loss(self, weights: Weights, fixed: Weights, token: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Weights]]:
        text = mean_loss(self.logits(weights, fixed, token), token, target_weights(token, self.marks)[0])
        return text, (text, fixed)

    def logits(self, weights: Weights, fixed: Weights, token: jax.Array) -> jax.Array:
        return plain_logits(self.shape, weights, token, starts(token, self.marks), self.dtype)
