"""The loop: it learns, it can be interrupted, and the seed decides everything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.cli.vocabulary import learn_vocabulary
from tools.train_small.objective import Marks
from tools.train_small.optimizer import orthogonalise
from tools.train_small.pack import Packed
from tools.train_small.shapes import PlainShape
from tools.train_small.tasks import Plain
from tools.train_small.trainer import Curve, Guard, Plan, State, Trainer
from tools.train_small.weights import _spread_tokens

SHAPE = PlainShape(n_layer=1, n_embd=32, n_head=2, n_ff=64, n_vocab=640)
VOCABULARY = learn_vocabulary(640)
MARKS = Marks.of(VOCABULARY)


def windows(n: int, width: int) -> np.ndarray:
    """Conversations in which the assistant says the question once more."""
    rng = np.random.default_rng(width)
    question = rng.integers(10, 40, (n, width // 2 - 2))
    edge = np.array([[MARKS.bos, MARKS.user]]).repeat(n, axis=0)
    return np.concatenate([edge, question, np.full((n, 1), MARKS.assistant), question, np.full((n, 1), MARKS.eos)], axis=1).astype(
        np.uint16
    )


DATA = Packed(VOCABULARY, windows(96, 32), windows(6, 32))


def test_it_learns_and_goes_on_from_a_checkpoint_as_if_nothing_had_been(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    plan = Plan(60, peak=1e-2, batch_tokens=256, seed=1, checkpoint=path)
    with ThreadPoolExecutor(3) as pool:
        trainer = Trainer(Plain(SHAPE, MARKS, jnp.dtype(jnp.float32)), DATA, MARKS, plan, pool)
    before = trainer.held_out_loss()
    curve = Curve()
    assert trainer.run(curve, 0.0, 600.0) == 60
    after = trainer.held_out_loss()
    assert after < 0.7 * before
    assert curve.rows[-1][:2] == ("plain", 60)
    assert curve.rows[-1][5] == pytest.approx(after)

    trainer.restart()
    assert trainer.held_out_loss() == pytest.approx(before)
    trainer.run(Curve(), 0.0, 600.0, 25)
    trainer.save()
    trainer.restart()
    assert int(trainer.state.step) == 25
    assert trainer.run(Curve(), 0.0, 600.0) == 60
    assert trainer.held_out_loss() == pytest.approx(after, rel=1e-5)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    g = jnp.asarray(np.random.default_rng(0).standard_normal((3, 24, 64)), jnp.float32)
    for matrices in (g, jnp.swapaxes(g, 1, 2)):
        values = np.linalg.svd(np.asarray(orthogonalise(matrices)), compute_uv=False)
        assert values.shape == (3, 24)
        assert 0.5 < values.min() and values.max() < 1.4


def test_tables_spread_the_tokens_over_the_experts() -> None:
    counts = np.random.default_rng(0).zipf(1.5, 500).clip(max=5000)
    table = _spread_tokens(np.random.default_rng(1), counts, 6, 2)
    assert all(len(set(row)) == 2 for row in table.tolist())
    load = np.bincount(table.reshape(-1), weights=np.repeat(counts, 2), minlength=6)
    assert load.max() < 1.2 * load.min() + 2 * counts.max()


def test_training_that_goes_wrong_is_taken_back() -> None:
    def state(step: int, value: float) -> State:
        return State({"w": jnp.float32(value)}, {}, (), jnp.int32(step))

    guard = Guard(peak=1.0)
    for step, loss in ((100, 3.0), (200, 2.0), (300, 2.1)):
        now = state(step, loss)
        assert guard.check(now, loss) is now
    back = guard.check(state(400, 9.0), float("nan"))
    assert (float(back.weights["w"]), int(back.step), guard.peak) == (2.0, 400, 0.5)
    assert guard.check(state(500, 2.0), 2.0).step == 500
    last = guard.check(state(600, 2.2), 2.2, is_last=True)  # not so bad as to go back from, and not the best there was
    assert (float(last.weights["w"]), int(last.step)) == (2.0, 600)
