"""The training loop: compiled steps, batches from arrays on the device, a clock, and checkpoints."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tools.train_small.objective import Marks, measure
from tools.train_small.optimizer import learning_rate, make_optimizer
from tools.train_small.pack import Packed
from tools.train_small.tasks import Task
from tools.train_small.weights import Weights

TIMED_FROM, TIMED_TO = 10, 40  # steps whose time says how many steps there is time for
REPORT_EVERY = 100


class State(NamedTuple):
    """All that a step changes."""

    weights: Weights
    fixed: Weights
    optimizer: optax.OptState
    step: jax.Array


@dataclass(frozen=True)
class Plan:
    """How to train. n_step: steps, or None for as many as there is time for. peak: largest learning rate. batch_tokens: tokens a step."""

    n_step: int | None
    peak: float
    batch_tokens: int
    seed: int
    checkpoint: Path | None = None
    checkpoint_seconds: float = 150.0


@dataclass
class Curve:
    """What was measured on the way: rows of (model, step, tokens, minutes, training loss, held-out loss or NaN)."""

    rows: list[tuple[str, int, int, float, float, float]] = field(default_factory=list)


class Trainer:
    """One model in training on this device."""

    def __init__(self, task: Task, data: Packed, marks: Marks, plan: Plan, pool: ThreadPoolExecutor) -> None:
        self.task, self.plan, self.marks = task, plan, marks
        self.state = self._begin()
        self.arrays = {"short": jnp.asarray(data.short), "long": jnp.asarray(data.long)}
        n_row = {name: max(plan.batch_tokens // array.shape[1], 1) for name, array in self.arrays.items()}
        self.n_row = {name: min(n, len(self.arrays[name])) for name, n in n_row.items()}
        self.held_out = _whole_batches(data.held_out, self.n_row["short"])
        self._steps = {name: pool.submit(self._compile_step, name) for name in self.arrays}
        self._measure: Future[Any] = pool.submit(self._compile_measure)

    def _begin(self) -> State:
        weights, fixed = self.task.begin(self.plan.seed)
        state = State(weights, fixed, make_optimizer(weights).init(weights), jnp.int32(0))
        if self.plan.checkpoint and self.plan.checkpoint.exists():
            with np.load(self.plan.checkpoint) as file:
                leaves = [jnp.asarray(file[str(i)]) for i in range(len(jax.tree.leaves(state)))]
            state = jax.tree.unflatten(jax.tree.structure(state), leaves)
            print(f"{self.task.name}: going on from step {int(state.step)}", flush=True)
        return state

    def _compile_step(self, name: str) -> Any:
        optimizer = make_optimizer(self.state.weights)
        jitted = jax.jit(partial(_step, self.task, optimizer, self.plan.peak), donate_argnums=0)
        rows = jnp.zeros(self.n_row[name], jnp.int32)
        return jitted.lower(self.state, self.arrays[name], rows, jnp.float32(1)).compile()

    def _compile_measure(self) -> Any:
        return jax.jit(partial(_measure, self.task, self.marks)).lower(self.state.weights, self.state.fixed, self.held_out[0]).compile()

    def held_out_loss(self) -> float:
        """Return the mean cross entropy of the assistant's tokens in the held-out windows."""
        sums = [self._measure.result()(self.state.weights, self.state.fixed, batch) for batch in self.held_out]
        return float(sum(s for s, _ in sums) / sum(n for _, n in sums))

    def restart(self) -> None:
        """Begin anew: from the checkpoint if there is one, else from the first weights."""
        self.state = self._begin()

    @property
    def n_parameter(self) -> int:
        """Trained numbers."""
        return sum(w.size for w in self.state.weights.values())

    def run(self, curve: Curve, began: float, seconds: float, most_steps: int | None = None) -> int:
        """Train until the steps are done or so many seconds are over.

        Args:
            began: time of the curve's minute 0.
            most_steps: do no more than these, whatever there is time for.

        Returns the number of steps done.
        """
        plan, step, tokens = self.plan, int(self.state.step), 0
        n_step: float = min(plan.n_step or 1e9, most_steps or 1e9)
        schedule = float(plan.n_step or 20_000)  # until it is known; only the rise depends on it
        first = timed = saved = time.monotonic()
        timed_at = step
        batches = _Batches(plan.seed, {name: len(array) for name, array in self.arrays.items()}, self.n_row, self._share_long())
        for _ in range(step):
            batches.next()
        while step < n_step:
            name, rows = batches.next()
            self.state, loss = self._steps[name].result()(self.state, self.arrays[name], rows, jnp.float32(schedule))
            step += 1
            tokens += self.n_row[name] * self.arrays[name].shape[1]
            here = step - timed_at
            if plan.n_step is None and here in (TIMED_FROM, TIMED_TO):
                loss.block_until_ready()
                now = time.monotonic()
                if here == TIMED_TO:
                    per_step = (now - timed) / (TIMED_TO - TIMED_FROM)
                    left = max(seconds - (now - first), 0.0) * 0.97  # measuring and saving take time too
                    n_step = schedule = float(min(step + int(left / per_step), most_steps or 1 << 30))
                    _say(f"{self.task.name}: {per_step * 1000:.0f} ms a step, {int(n_step)} steps")
                timed = now
            if step % REPORT_EVERY == 0 or step == n_step:
                value, now = float(loss), time.monotonic()
                tested = self.held_out_loss() if step % (5 * REPORT_EVERY) == 0 or step == n_step else float("nan")
                curve.rows.append((self.task.name, step, tokens, (now - began) / 60, value, tested))
                rate = tokens / (now - first)
                _say(f"{self.task.name} step {step}: loss {value:.3f}, held out {tested:.3f}, {rate / 1e3:.0f} k tokens/s, "
                    f"{(now - began) / 60:.1f} min")  # fmt: skip
                if plan.n_step is None and now - first > seconds * 1.05:
                    _say(f"{self.task.name}: the time is over")
                    break
                if plan.checkpoint and now - saved > plan.checkpoint_seconds:
                    self.save()
                    saved = now
        return step

    def _share_long(self) -> float:
        """Share of steps whose windows are long: that of the tokens that lie in them."""
        size = {name: array.size for name, array in self.arrays.items()}
        return size["long"] / (size["long"] + size["short"])

    def save(self) -> None:
        """Write a checkpoint that another run can go on from."""
        assert self.plan.checkpoint is not None
        part = self.plan.checkpoint.with_suffix(".part.npz")
        np.savez(part, **{str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.state))})
        part.replace(self.plan.checkpoint)


class _Batches:
    """Rows for each step: windows of a kind in random order, all of them before any comes again; kinds in proportion."""

    def __init__(self, seed: int, n_window: dict[str, int], n_row: dict[str, int], share_long: float) -> None:
        self._rng = np.random.default_rng(seed)
        self._n_window, self._n_row, self._share_long = n_window, n_row, share_long
        self._left: dict[str, list[int]] = {name: [] for name in n_window}
        self._debt = 0.0

    def next(self) -> tuple[str, np.ndarray]:
        """Return the kind of the next batch and its rows, int32."""
        self._debt += self._share_long
        name = "long" if self._debt >= 1 else "short"
        self._debt -= name == "long"
        n = self._n_row[name]
        if len(self._left[name]) < n:
            self._left[name] = self._rng.permutation(self._n_window[name]).tolist()
        rows, self._left[name] = self._left[name][:n], self._left[name][n:]
        return name, np.array(rows, np.int32)


def _say(message: str) -> None:
    print(message, flush=True)


def _step(
    task: Task, optimizer: optax.GradientTransformation, peak: float, state: State, windows: jax.Array, rows: jax.Array, n_step: jax.Array
) -> tuple[State, jax.Array]:
    token = windows[rows].astype(jnp.int32)
    grad = jax.grad(task.loss, has_aux=True)
    grads, (loss, fixed) = grad(state.weights, state.fixed, token)
    updates, moments = optimizer.update(grads, state.optimizer, state.weights)
    rate = learning_rate(state.step.astype(jnp.float32), n_step, peak)
    weights = jax.tree.map(lambda w, u: w - rate * u, state.weights, updates)
    return State(weights, fixed, moments, state.step + 1), loss


def _measure(task: Task, marks: Marks, weights: Weights, fixed: Weights, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    return measure(partial(task.logits, weights, fixed), token, marks)


def _whole_batches(windows: np.ndarray, n_row: int) -> list[jax.Array]:
    """Cut windows to batches of one size; padding windows (all token 0) are one conversation's start without an assistant."""
    padded = np.concatenate([windows, np.zeros((-len(windows) % n_row, windows.shape[1]), windows.dtype)])
    return [jnp.asarray(batch, jnp.int32) for batch in padded.reshape(-1, n_row, windows.shape[1])]
