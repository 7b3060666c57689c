"""The decode step's choice of rows against the plain scores, and that it lowers for a GPU."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.cli.presets import TINY
from ds4jax.config import FLASH
from ds4jax.model.cache import Rows
from ds4jax.model.indexer import index_scores
from ds4jax.model.kernels import index as kernel
from ds4jax.model.rope import frequencies, rotate
from ds4jax.model.rounding import fp4_sim, hadamard
from tests.model.lowering import lower_for_cuda

HEADS, J, R, TOP_K = TINY.n_index_head, TINY.index_dim, TINY.n_rot, TINY.index_top_k
CAPACITY, LAYERS, SLOTS = 200, 2, 3
OMEGA = frequencies(TINY, compressed=True)
# Of scores about 1: FP4 products are exact in bfloat16 and only sums differ in order; plain queries and keys have 8 bits.
TOLERANCE = {"fp4": 1e-5, "bf16": 2e-2}


@partial(jax.jit, static_argnums=0)
def stored(format: str, values: jax.Array) -> Rows:
    """Store keys [L, S, rows, J]."""
    rows = Rows.zeros(format, LAYERS, SLOTS, CAPACITY, J, R)
    slot, number = jnp.meshgrid(jnp.arange(SLOTS), jnp.arange(CAPACITY), indexing="ij")
    for layer in range(LAYERS):
        rows = rows.write(layer, slot, number, values[layer])
    return rows


@partial(jax.jit, static_argnames="rounded")
def plain_scores(q, weight, keys, layer, slot, position, *, rounded: bool):
    """Score all rows as the array code does: [M, rows]."""
    q = rotate(q.reshape(-1, 1, HEADS, J), position[:, None, None], OMEGA)
    if rounded:
        q = fp4_sim(hadamard(q))
    key = keys.read(layer, slot[:, None], jnp.arange(CAPACITY)[None, :])
    return index_scores(q, weight[:, None] * (1.0 / (HEADS * J) ** 0.5), key)[:, 0]


choose = jax.jit(partial(kernel.choose_rows, top_k=TOP_K, omega=OMEGA))


def inputs(m: int, format: str):
    rng = np.random.default_rng(m)
    q, weight = (jnp.asarray(rng.normal(size=(m, n)).astype(np.float32)) for n in (HEADS * J, HEADS))
    keys = rng.normal(size=(LAYERS, SLOTS, CAPACITY, J)).astype(np.float32)
    return q, weight, stored(format, jnp.asarray(keys))


@pytest.mark.parametrize("format", ["fp4", "bf16"])
def test_it_chooses_the_best_rows(format: str) -> None:
    q, weight, keys = inputs(5, format)
    slot, position = jnp.int32([2, 0, 1, 2, 0]), jnp.int32([799, 131, 127, 5000, 301])
    rows, n = (np.asarray(a) for a in choose(q, weight, keys, jnp.int32(1), slot, position))
    scores = np.asarray(plain_scores(q, weight, keys, jnp.int32(1), slot, position, rounded=format == "fp4"))
    for row, count, score, at in zip(rows, n, scores, np.asarray(position), strict=True):
        visible = min((at + 1) // 4, CAPACITY)
        assert count == min(visible, TOP_K)
        assert np.all(np.diff(row[:count]) > 0) and row[0] >= 0 and row[count - 1] < visible
        edge = np.sort(score[:visible])[-count]
        best, possible = (set(np.flatnonzero(score[:visible] > edge + d)) for d in (TOLERANCE[format], -TOLERANCE[format]))
        assert best <= set(row[:count]) <= possible


def test_ties_go_to_the_earlier_rows() -> None:
    """Keys along one axis make scores that are plain numbers."""
    value = np.zeros(CAPACITY, np.float32)
    value[[3, 50, 51, 180]] = 2.0
    value[np.arange(10, 190, 5)] = 1.0  # 36 equals, of which 28 have room
    value[0] = -1.0  # relu makes it an equal of the zeros
    keys = np.zeros((LAYERS, SLOTS, CAPACITY, J), np.float32)
    keys[..., 0] = value
    q = np.zeros((1, HEADS * J), np.float32)
    q[0, 0] = 1.0
    rows, n = choose(q, jnp.ones((1, HEADS)), stored("bf16", jnp.asarray(keys)), jnp.int32(0), jnp.int32([1]), jnp.int32([799]))
    (expected,) = np.sort(jax.lax.top_k(np.maximum(value, 0)[None, :], TOP_K)[1])
    np.testing.assert_array_equal(rows[0], expected)
    assert n[0] == TOP_K


@given(
    scores=st.lists(st.sampled_from([-3.5, -1e-30, 0.0, 1e-30, 0.25, 1.0, 1.0000001, 7.0, 1e30]), min_size=33, max_size=CAPACITY),
    sign=st.sampled_from([1.0, -1.0]),
)
@settings(max_examples=30)
def test_any_scores_are_cut_at_the_right_place(scores: list[float], sign: float) -> None:
    """Two heads, one for the positive and one for the negative scores, give a row any score."""
    value = np.zeros((LAYERS, SLOTS, CAPACITY, J), np.float32)
    value[..., : len(scores), 0] = np.float32(scores)
    keys = stored("bf16", jnp.asarray(value))
    q = np.zeros((1, HEADS, J), np.float32)
    q[0, 0, 0], q[0, 1, 0] = 1.0, -1.0
    weight = jnp.zeros((1, HEADS)).at[0, 0].set(sign).at[0, 1].set(-sign)
    position = jnp.int32([4 * len(scores) - 1])
    rows, n = choose(q.reshape(1, -1), weight, keys, jnp.int32(1), jnp.int32([0]), position)
    stored_value = np.asarray(keys.parts["x"][1, 0, : len(scores), 0].astype(jnp.float32)) * sign
    expected = np.sort(np.argsort(-stored_value, kind="stable")[:TOP_K])
    assert n[0] == TOP_K
    np.testing.assert_array_equal(rows[0], expected)


def test_a_row_depends_on_itself_alone() -> None:
    q, weight, keys = inputs(5, "fp4")
    slot, position, layer = jnp.int32([0, 1, 2, 0, 2]), jnp.int32([700, 400, 799, 90, 301]), jnp.int32(0)
    rows, n = choose(q, weight, keys, layer, slot, position)
    order = np.int32([3, 1, 4, 0, 2])
    shuffled, n_shuffled = choose(q[order], weight[order], keys, layer, slot[order], position[order])
    np.testing.assert_array_equal(n[order], n_shuffled)
    np.testing.assert_array_equal(rows[order][:, : min(n)], shuffled[:, : min(n)])
    unused, n_unused = choose(q, weight, keys, layer, slot.at[1].set(SLOTS), position)
    assert n_unused[1] == 0
    others = np.int32([0, 2, 4])
    np.testing.assert_array_equal(unused[others], rows[others])


def test_it_says_what_it_cannot_take() -> None:
    keys = Rows.zeros("bf16", 1, 1, 8, 128, 64)
    assert kernel.fits(keys) and not kernel.fits(dataclasses.replace(keys, parts={"x": keys.parts["x"][..., :64]}))
    huge = jax.eval_shape(lambda: Rows.zeros("fp4", 21, 64, 25000, 128, 64))  # 2.2 GB of bytes
    assert not kernel.fits(huge)


@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("format", ["fp4", "bf16"])
def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch, m: int, format: str) -> None:
    vector = jax.ShapeDtypeStruct((m,), jnp.int32)
    shapes = [
        *(jax.ShapeDtypeStruct((m, n), jnp.float32) for n in (64 * 128, 64)),
        jax.eval_shape(lambda: Rows.zeros(format, 21, 16, 25000, 128, 64)),
        jax.ShapeDtypeStruct((), jnp.int32),
        vector,
        vector,
    ]
    function = partial(kernel.choose_rows, top_k=512, omega=frequencies(FLASH, compressed=True))
    text = lower_for_cuda(monkeypatch, function, *shapes)
    assert all(name in text for name in ("index_query", "index_score", "index_select"))
