"""The decode step's attention kernel against the running softmax of the plain path, and that it lowers for a GPU."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.cli.presets import TINY
from ds4jax.config import FLASH
from ds4jax.model.cache import Rows
from ds4jax.model.kernels import attend as kernel
from ds4jax.model.kernels.attend import Tiling
from ds4jax.model.norm import rms_norm
from ds4jax.model.rope import frequencies, rotate
from ds4jax.model.softmax import RunningSoftmax
from tests.model.lowering import lower_for_cuda

N, K, R, WINDOW = TINY.n_head, TINY.head_dim, TINY.n_rot, TINY.n_window
OMEGA = frequencies(TINY, compressed=True)
CAPACITY, LAYERS, SLOTS = 80, 2, 3
SMALL = Tiling(heads=16, rows=16, parts=3, warps=4, sum_heads=2)
# Queries and weights have 11 bits (float16, for FP8 rows) or 8 (bfloat16), and the result is bfloat16: half a unit in its last
# place, 2**-9, of values up to about 3 is the largest error of the first and a third of that of the second.
TOLERANCE = {"fp8": 1e-2, "bf16": 3e-2, "f32": 3e-2}


@cache
def random_rows(format: str, n_row: int, seed: int) -> Rows:
    values = np.random.default_rng(seed).normal(size=(LAYERS, SLOTS, n_row, K)).astype(np.float32)
    return stored(format, jnp.asarray(values))


@partial(jax.jit, static_argnums=0)
def stored(format: str, values: jax.Array) -> Rows:
    """Store rows [L, S, rows, K]."""
    rows = Rows.zeros(format, *values.shape, R)
    slot, number = jnp.meshgrid(jnp.arange(SLOTS), jnp.arange(values.shape[2]), indexing="ij")
    for layer in range(LAYERS):
        rows = rows.write(layer, slot, number, values[layer])
    return rows


@partial(jax.jit, static_argnames="ratio")
def plain(q, sinks, raw, comp, chosen, at_raw, at_comp, layer, slot, position, *, ratio: int):
    """Attend as the array code does; chosen as for the kernel."""
    m = q.shape[0]
    pos = position[:, None]
    q = rotate(rms_norm(q.reshape(m, 1, N, K), TINY.rms_eps), pos[:, :, None], OMEGA)
    ring = jnp.arange(WINDOW)[None, :]
    acc = RunningSoftmax.start(sinks[layer], q).absorb(q, raw.read(at_raw, slot[:, None], ring), (ring <= pos)[:, None, :])
    if comp is not None:
        number, n = chosen if chosen is not None else (jnp.arange(comp.n_row)[None, :], (position + 1) // ratio)
        seen = jnp.broadcast_to(jnp.arange(number.shape[1])[None, :] < n[:, None], (m, number.shape[1]))
        acc = acc.absorb(q, comp.read(at_comp, slot[:, None], number), seen[:, None, :])
    return rotate(acc.result(), pos[:, :, None], OMEGA, inverse=True).reshape(m, N * K)


def case(position: list[int], format: str, *, compressed: bool, pick: int = 0):
    m = len(position)
    rng = np.random.default_rng(m)
    q = jnp.asarray(rng.normal(size=(m, N * K)).astype(np.float32) * 5)
    sinks = jnp.asarray(rng.normal(size=(LAYERS, N)).astype(np.float32))
    at = jnp.asarray(position, jnp.int32)
    chosen = None
    if pick:
        n = np.minimum((np.asarray(position) + 1) // 4, pick).astype(np.int32)
        list_of = [np.sort(rng.permutation(max((p + 1) // 4, pick))[:pick]) for p in position]
        chosen = (jnp.asarray(np.stack(list_of).astype(np.int32)), jnp.asarray(n))
    slot = jnp.asarray([2, 0, 1, 2, 0][:m], jnp.int32)
    comp = random_rows(format, CAPACITY, 2) if compressed else None
    layers = [jnp.int32(i) for i in (1, 1, 0)]
    return [q, sinks, random_rows(format, WINDOW, 1), comp, chosen, *layers, slot, at]


attend = jax.jit(partial(kernel.attend, n_head=N, ratio=4, omega=OMEGA, eps=TINY.rms_eps), static_argnames="tiles")


@pytest.mark.parametrize(
    "format, compressed, pick",
    [("fp8", False, 0), ("fp8", True, 0), ("fp8", True, 24), ("bf16", True, 24), ("f32", True, 0)],
    ids=["window", "all", "chosen", "bf16", "f32"],
)
def test_it_is_the_plain_attention(format: str, compressed: bool, pick: int) -> None:
    arguments = case([0, 62, 300, 3, 97], format, compressed=compressed, pick=pick)
    got = attend(*arguments, tiles=SMALL)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), plain(*arguments, ratio=4), atol=TOLERANCE[format])


@pytest.mark.parametrize("m", [1, 64])
def test_the_tiles_of_small_and_large_buckets_work(m: int) -> None:
    arguments = case([163], "fp8", compressed=True)
    got = attend(*arguments, tiles=dataclasses.replace(kernel.tiling(m), sum_heads=N))
    np.testing.assert_allclose(got.astype(jnp.float32), plain(*arguments, ratio=4), atol=TOLERANCE["fp8"])


def test_a_row_depends_on_itself_alone() -> None:
    q, sinks, raw, comp, chosen, *layers, slot, position = case([5, 310, 70, 20, 97], "fp8", compressed=True)
    together = attend(q, sinks, raw, comp, chosen, *layers, slot, position, tiles=SMALL)
    order = np.int32([2, 4, 1, 0, 3])
    shuffled = attend(q[order], sinks, raw, comp, chosen, *layers, slot[order], position[order], tiles=SMALL)
    np.testing.assert_array_equal(together[order], shuffled)
    # What lies past the live rows is not read: not even NaN there reaches the result, nor does an unused row between the others.
    poison = dataclasses.replace(comp, parts=comp.parts | {"tail": comp.parts["tail"].at[:, 2, 5:].set(jnp.nan)})
    unused = attend(q, sinks, raw, poison, chosen, *layers, slot.at[1].set(SLOTS), position, tiles=SMALL)
    others = np.int32([0, 2, 3, 4])
    np.testing.assert_array_equal(together[others], unused[others])
    assert np.all(np.isfinite(unused.astype(jnp.float32)))


def test_a_sink_far_above_and_far_below_stays_finite() -> None:
    arguments = case([0, 62, 300, 3, 97], "fp8", compressed=True)
    arguments[1] = jnp.full((LAYERS, N), 90.0)
    quiet = attend(*arguments, tiles=SMALL).astype(jnp.float32)
    assert np.all(np.isfinite(quiet)) and np.abs(quiet).max() < 1e-6
    arguments[1] = jnp.full((LAYERS, N), -90.0)
    np.testing.assert_allclose(attend(*arguments, tiles=SMALL).astype(jnp.float32), plain(*arguments, ratio=4), atol=TOLERANCE["fp8"])


def test_it_says_what_it_cannot_take() -> None:
    raw = random_rows("fp8", WINDOW, 1)
    assert kernel.fits(raw, raw, 4) and not kernel.fits(raw, None, 3)
    assert not kernel.fits(dataclasses.replace(random_rows("bf16", 8, 1), n_rot=24), None, 4)
    huge = jax.eval_shape(lambda: Rows.zeros("fp8", 21, 64, 4096, 512, 64))  # codes: 2.5 GB of bytes
    assert not kernel.fits(huge, None, 4)


@pytest.mark.parametrize("m", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch, m: int, kind: str) -> None:
    def rows(layers: int, n_row: int) -> Rows:
        return jax.eval_shape(lambda: Rows.zeros("fp8", layers, 16, n_row, 512, 64))

    vector, scalar = jax.ShapeDtypeStruct((m,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    shapes = [
        jax.ShapeDtypeStruct((m, 64 * 512), jnp.float32),
        jax.ShapeDtypeStruct((43, 64), jnp.float32),
        rows(43, 128),
        None if kind == "window" else rows(20, 800) if kind == "all" else rows(21, 25000),
        (jax.ShapeDtypeStruct((m, 512), jnp.int32), vector) if kind == "chosen" else None,
        *[scalar] * 3,
        vector,
        vector,
    ]
    function = partial(kernel.attend, n_head=64, ratio=128, omega=frequencies(FLASH, compressed=True), eps=1e-6)
    text = lower_for_cuda(monkeypatch, function, *shapes)
    assert "attend_part" in text and "attend_sum" in text
