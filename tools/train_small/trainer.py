"""The training loop: compiled steps, batches from arrays on the device, a clock, and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
        self.windows = jnp.asarray(data.windows)
        self.n_row = min(max(plan.batch_tokens // self.windows.shape[1], 1), len(self.windows))
        self.held_out = _whole_batches(data.held_out, self.n_row)
        self._step: Future[Any] = pool.submit(self._compile_step)
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

    def _compile_step(self) -> Any:
        optimizer = make_optimizer(self.state.weights)
        jitted = jax.jit(partial(_step, self.task, optimizer), donate_argnums=0)
        return jitted.lower(self.state, self.windows, jnp.zeros(self.n_row, jnp.int32), jnp.float32(1), jnp.float32(1)).compile()

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
        self._step.result()
        _say(f"{self.task.name}: compiled after {time.monotonic() - began:.0f} s")
        guard, lost, n_lost = Guard(plan.peak), jnp.float32(0), 0
        batches = _batches(plan.seed, len(self.windows), self.n_row)
        for _ in range(step):
            next(batches)
        while step < n_step:
            self.state, loss = self._step.result()(self.state, self.windows, next(batches), jnp.float32(schedule), jnp.float32(guard.peak))
            step, lost, n_lost = step + 1, lost + loss, n_lost + 1
            tokens += self.n_row * self.windows.shape[1]
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
                value, now = float(lost) / n_lost, time.monotonic()
                lost, n_lost = jnp.float32(0), 0
                self.state = guard.check(self.state, value, is_last=step == n_step)
                tested = self.held_out_loss() if step % (5 * REPORT_EVERY) == 0 or step == n_step else float("nan")
                curve.rows.append((self.task.name, step, tokens, (now - began) / 60, value, tested))
                rate = tokens / (now - first)
                _say(
                    f"{self.task.name} step {step}: loss {value:.3f}, held out {tested:.3f}, {rate / 1e3:.0f} k tokens/s, "
                    f"{(now - began) / 60:.1f} min"
                )
                if plan.n_step is None and now - first > seconds * 1.05:
                    _say(f"{self.task.name}: the time is over")
                    break
                if plan.checkpoint and now - saved > plan.checkpoint_seconds:
                    self.save()
                    saved = now
        return step

    def save(self) -> None:
        """Write a checkpoint that another run can go on from."""
        assert self.plan.checkpoint is not None
        part = self.plan.checkpoint.with_suffix(".part.npz")
        np.savez(part, **{str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(self.state))})
        part.replace(self.plan.checkpoint)


class Guard:
    """Notice when training goes wrong, and go back to where it did not, with half the learning rate from there on."""

    def __init__(self, peak: float) -> None:
        self.peak = peak
        self._best = float("inf")
        self._best_state: State | None = None
        self._kept: list[State] = []  # of the last reports that were well; what goes wrong has begun some time before it is seen

    def check(self, state: State, loss: float, *, is_last: bool = False) -> State:
        """Return the state to go on from, or, at the end, to keep. loss: the mean since the last report."""
        if loss <= self._best:
            self._best, self._best_state = loss, jax.tree.map(jnp.copy, state)
        if loss <= (1.03 if is_last else 1.2) * self._best + 0.05:
            self._kept = [*self._kept[-1:], jax.tree.map(jnp.copy, state)]
            return state
        if self._best_state is None:
            raise FloatingPointError("the loss is not a number from the beginning; choose a smaller --peak")
        self.peak /= 2
        _say(f"the loss has risen from {self._best:.3f} to {loss:.3f}: back, with a peak of {self.peak:.1e}")
        back_to = self._best_state if is_last else self._kept[0]
        return jax.tree.map(jnp.copy, back_to)._replace(step=state.step)


def _batches(seed: int, n_window: int, n_row: int) -> Iterator[np.ndarray]:
    """Yield the rows of each step, int32 [n_row]: windows in random order, all of them before any comes again."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(n_window).astype(np.int32)
        yield from (order[first : first + n_row] for first in range(0, n_window - n_row + 1, n_row))


def _say(message: str) -> None:
    print(message, flush=True)


def _step(
    task: Task,
    optimizer: optax.GradientTransformation,
    state: State,
    windows: jax.Array,
    rows: jax.Array,
    n_step: jax.Array,
    peak: jax.Array,
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
