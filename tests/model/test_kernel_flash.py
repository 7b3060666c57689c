"""The chunk's attention kernel against the running softmax of the plain path, and that it lowers for a GPU."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.cli.presets import TINY
from ds4jax.config import FLASH
from ds4jax.model.kernels import flash as kernel
from ds4jax.model.kernels.flash import Tile, flash
from ds4jax.model.softmax import RunningSoftmax
from tests.model.lowering import lower_for_cuda

N, K, WINDOW = TINY.n_head, TINY.head_dim, 32
B, T, C, PICK, RATIO = 2, 6, 24, 10, 4
START = np.int32([3, 70])  # one looks back to before the conversation's beginning
LAYER = np.int32([1])


def example(seed: int, *, pick: bool) -> dict[str, np.ndarray | None]:
    rng = np.random.default_rng(seed)
    position = START[:, None] + np.arange(T)
    n_comp = np.minimum((position + 1) // RATIO, C).astype(np.int32)
    chosen = np.sort(rng.random((B, T, C)).argsort(axis=2)[:, :, :PICK]).astype(np.int32)
    return {
        "q": rng.normal(size=(B, T, N, K)).astype(np.float16) * 3,
        "keys": rng.normal(size=(B, WINDOW + T + C, K)).astype(np.float16),
        "sinks": rng.normal(size=(2, N)).astype(np.float32),
        "start": START,
        "n": np.int32([T, T - 2]),
        "n_comp": np.minimum(n_comp, PICK) if pick else n_comp,
        "chosen": chosen if pick else None,
    }


@cache
def compiled(pick: bool):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "TILE", Tile(16, 4, 1))
        return jax.jit(partial(flash, window=WINDOW)).lower(**example(0, pick=pick), layer=LAYER).compile()


def attend(case: dict[str, np.ndarray | None]) -> np.ndarray:
    return np.asarray(compiled(case["chosen"] is not None)(**case, layer=LAYER), np.float32)


def plain(case: dict[str, np.ndarray | None]) -> np.ndarray:
    """Attend as the array code does, with a mask over all keys."""
    seen = np.zeros((B, T, WINDOW + T + C), bool)
    for b, t in np.ndindex(B, T):
        seen[b, t, rows_of(case, b, t)] = t < case["n"][b]
    q, keys = jnp.asarray(case["q"], jnp.float32), jnp.asarray(case["keys"], jnp.float32)
    return np.asarray(RunningSoftmax.start(jnp.asarray(case["sinks"][1]), q).absorb(q, keys, jnp.asarray(seen)).result())


def rows_of(case: dict[str, np.ndarray | None], b: int, t: int) -> list[int]:
    """List the keys that a token sees."""
    numbers = np.arange(case["n_comp"][b, t])
    if case["chosen"] is not None:
        numbers = case["chosen"][b, t][numbers]
    return [t + 1 + j for j in range(WINDOW) if START[b] + t - WINDOW + 1 + j >= 0] + [WINDOW + T + number for number in numbers]


@pytest.mark.parametrize("pick", [False, True])
def test_each_token_attends_to_its_rows(pick: bool) -> None:
    case = example(0, pick=pick)
    # Weights and results have 11 bits: 2**-12 each, of values up to about 3.
    np.testing.assert_allclose(attend(case), plain(case), atol=4e-3)


@settings(max_examples=10)
@given(seed=st.integers(1, 2**31), pick=st.booleans(), b=st.integers(0, B - 1), t=st.integers(0, T - 1))
def test_a_token_ignores_what_it_does_not_see(seed: int, pick: bool, b: int, t: int) -> None:
    case, other = example(0, pick=pick), example(seed, pick=pick)
    other["keys"] = np.full_like(other["keys"], np.nan)
    other["keys"][b, rows_of(case, b, t)] = case["keys"][b, rows_of(case, b, t)]
    for name in ("q", "chosen") if pick else ("q",):
        other[name][b, t] = case[name][b, t]
    other["sinks"], other["n"] = case["sinks"], np.int32([t + 1, t + 1])
    other["n"][b] = min(t + 1, case["n"][b])
    np.testing.assert_array_equal(attend(other)[b, t], attend(case)[b, t])


def test_what_it_cannot_take_is_refused() -> None:
    assert kernel.fits(FLASH.n_head, FLASH.head_dim, FLASH.n_window)
    assert kernel.fits(TINY.n_head, TINY.head_dim, TINY.n_window)
    assert not kernel.fits(128, 512, 128)
    assert not kernel.fits(64, 512, 100)  # no whole tiles


@pytest.mark.parametrize("pick", [0, FLASH.index_top_k])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch, pick: int, dtype: jnp.dtype) -> None:
    def i32(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    t, n, k, w = 2048, FLASH.n_head, FLASH.head_dim, FLASH.n_window
    arrays = [jax.ShapeDtypeStruct((1, t, n, k), dtype), jax.ShapeDtypeStruct((1, w + t + 1024, k), dtype)]
    sinks = jax.ShapeDtypeStruct((43, n), jnp.float32)
    chosen = i32(1, t, pick) if pick else None
    lower_for_cuda(monkeypatch, partial(flash, window=w), *arrays, sinks, i32(1), i32(1), i32(1), i32(1, t), chosen)
