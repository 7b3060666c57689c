"""What rows get on a CPU does not depend on how many they are: the same bits in every batch, as users compile it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.model.hyper import sinkhorn
from ds4jax.model.norm import rms_norm
from ds4jax.model.quant import dot
from ds4jax.model.softmax import RunningSoftmax
from ds4jax.model.sums import largest, ordered_softmax, ordered_sum
from tests.compiler import run_as_users_do

BATCHES = (1, 3, 16, 512)  # among them the sizes at which XLA changes its ways
MOST = BATCHES[-1]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def assert_rows_stand_alone(function: Callable[..., jax.Array], *args: np.ndarray) -> None:
    """Run the first rows of the arguments, so many of them, and compare the rows of all results bit by bit."""
    whole = np.asarray(run_as_users_do(function, *args))
    for n in BATCHES[:-1]:
        some = np.asarray(run_as_users_do(function, *(a[:n] for a in args)))
        assert some.tobytes() == whole[:n].tobytes(), f"{n} rows differ from {MOST}"


@pytest.mark.parametrize("width", [4, 24, 96])
def test_sums_and_softmax(width: int) -> None:
    x = numbers(MOST, 4, width)
    assert_rows_stand_alone(lambda x: jnp.concatenate([ordered_sum(jnp.square(x), -1), ordered_softmax(x, 1)], -1), x)
    total, most = jax.jit(lambda x: (ordered_sum(x, -1)[..., 0], largest(x, -1)[..., 0]))(x)
    np.testing.assert_allclose(total, x.sum(-1, dtype=np.float64), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(most, x.max(-1))


def test_the_gradients_are_those_of_a_sum_and_of_a_softmax() -> None:
    x, weight = jnp.asarray(numbers(3, 4)), jnp.asarray(numbers(4, 3)).T

    def ours(x: jax.Array) -> jax.Array:
        return jnp.sum(ordered_softmax(x, -1) * weight) + jnp.sum(ordered_sum(x * x, 0))

    def plain(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(x, -1) * weight) + jnp.sum(x * x)

    np.testing.assert_allclose(jax.jit(jax.grad(ours))(x), jax.jit(jax.grad(plain))(x), rtol=1e-5, atol=1e-6)


def test_normalisations() -> None:
    assert_rows_stand_alone(lambda x: rms_norm(x, 1e-6), numbers(MOST, 512))
    assert_rows_stand_alone(lambda z: sinkhorn(z, 20, 1e-6), numbers(MOST, 4, 4))


@pytest.mark.parametrize(("n", "k"), [(24, 512), (128, 64), (384, 256)])
def test_products(n: int, k: int) -> None:
    w = jnp.asarray(numbers(n, k))
    assert_rows_stand_alone(lambda x: dot(x, w), numbers(MOST, k))


@pytest.mark.parametrize(("n_head", "k", "n_row"), [(4, 96, 32), (8, 128, 8)])
def test_attention(n_head: int, k: int, n_row: int) -> None:
    sinks = jnp.asarray(numbers(n_head))
    seen = numbers(MOST, 1, n_row) > -1

    def attend(q: jax.Array, rows: jax.Array, seen: jax.Array) -> jax.Array:
        begun = RunningSoftmax.start(sinks, q).absorb(q, rows, seen)
        return begun.absorb(q, rows[:, ::-1], seen).result()

    assert_rows_stand_alone(attend, numbers(MOST, 1, n_head, k), numbers(MOST, n_row, k), seen)


def test_rows_that_nobody_sees_change_no_bit() -> None:
    q, rows = numbers(2, 1, 4, 64), numbers(2, 32, 64)

    def attend(q: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        begun = RunningSoftmax.start(jnp.zeros(4), q).absorb(q, rows, jnp.ones((2, 1, 32), bool))
        return begun.result(), begun.absorb(q, rows, jnp.zeros((2, 1, 32), bool)).result()

    before, after = run_as_users_do(attend, q, rows)
    assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
