"""The cache's rounding against ds4's own rows and against independent small-float casts (ml_dtypes)."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.model import rounding

STEPS = Path(__file__).parents[1] / "fixtures" / "ds4_steps.npz"
N_KV = 448  # channels of an attention row that are rounded; the rotary tail is not


@pytest.fixture(scope="module")
def steps() -> dict[str, np.ndarray]:
    with np.load(STEPS) as file:
        return dict(file)


def bits(x: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def attention_row(x: jax.Array) -> jax.Array:
    return jnp.concatenate([rounding.fp8_sim(x[:, :N_KV]), x[:, N_KV:]], -1)


def indexer_row(x: jax.Array) -> jax.Array:
    return rounding.fp4_sim(rounding.hadamard(x.reshape(-1, 4, 128))).reshape(x.shape)


STEPS_OF_DS4: dict[str, Callable[[jax.Array], jax.Array]] = {
    "fp8_kv": attention_row,
    "indexer_hadamard_fp4": indexer_row,
    "f16": rounding.f16_round,
}


@pytest.mark.parametrize("name", STEPS_OF_DS4)
def test_bits_of_ds4(steps: dict[str, np.ndarray], name: str) -> None:
    got = jax.jit(STEPS_OF_DS4[name])(steps["input"])
    np.testing.assert_array_equal(bits(got), bits(steps[name]))


def test_bits_do_not_depend_on_the_compiler(steps: dict[str, np.ndarray]) -> None:
    """Operation by operation nothing is fused; the other steps share this one's arithmetic."""
    np.testing.assert_array_equal(bits(attention_row(jnp.asarray(steps["input"]))), bits(steps["fp8_kv"]))


def scale_exponent(amax: np.ndarray, largest: float) -> np.ndarray:
    """ceil(log2(amax / largest)), exact: float64 holds the quotient's distance from a power of two."""
    mantissa, e = np.frexp(amax.astype(np.float64) / largest)
    return np.where(mantissa == 0.5, e - 1, e)


def expected(x: np.ndarray, block: int, least: float, largest: float, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    blocks = x.reshape(-1, block)
    exponent = scale_exponent(np.maximum(np.abs(blocks).max(-1), np.float32(least)), largest)
    scaled = np.ldexp(blocks, -exponent[:, None]).astype(np.float32)
    return (np.ldexp(scaled.astype(dtype).astype(np.float32), exponent[:, None])).reshape(x.shape), exponent


FP8_SIM, FP4_SIM = jax.jit(rounding.fp8_sim), jax.jit(rounding.fp4_sim)
FP8_ENCODE, FP4_ENCODE = jax.jit(rounding.fp8_encode), jax.jit(rounding.fp4_encode)

# Quarter steps around powers of two: every tie, every exact power of two and its neighbours occur.
multiples = st.integers(-64, 64).map(lambda n: n / 4)
rows = st.lists(multiples, min_size=64, max_size=64)


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(-40, 40), st.sampled_from([0, -1, 1]))
def test_any_row(values: list[float], shift: int, nudge: int) -> None:
    x = np.ldexp(np.asarray(values, np.float32), shift)
    if nudge:
        x = np.nextafter(x, np.float32(nudge * np.inf), dtype=np.float32)
        x = np.where(np.abs(x) < 2.0**-100, np.float32(0), x)  # CPUs may flush subnormal inputs
    value, exponent = expected(x, 64, 1e-4, 448, ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(FP8_SIM(x), value)
    np.testing.assert_array_equal(FP8_ENCODE(x)[1], exponent)
    value, exponent = expected(x, 32, 6 * 2.0**-126, 6, ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(FP4_SIM(x), value)
    np.testing.assert_array_equal(FP4_ENCODE(x)[1], exponent)


def test_scale_is_exact_at_powers_of_two() -> None:
    amax = np.float32(448) * np.exp2(np.arange(-20, 21)).astype(np.float32)
    around = np.stack([np.nextafter(amax, np.float32(0)), amax, np.nextafter(amax, np.float32(np.inf))], -1)
    x = np.zeros((*around.shape, 64), np.float32)
    x[..., 5] = -around
    _, exponent = FP8_ENCODE(jnp.asarray(x))
    np.testing.assert_array_equal(exponent[..., 0], np.arange(-20, 21)[:, None] + np.array([0, 0, 1]))


def test_codes_are_standard_e4m3() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    exponent = np.array([[0], [3], [-4], [7]], np.int8)
    want = np.ldexp(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32), exponent.astype(np.int32))
    np.testing.assert_array_equal(jax.jit(rounding.fp8_decode)(jnp.asarray(codes), jnp.asarray(exponent)), want)


def test_fp4_nibbles_pair_the_halves_of_a_block() -> None:
    x = jnp.zeros(64).at[32].set(6.0).at[32 + 16].set(-0.5)  # second block, element 0 and element 16
    packed, exponent = FP4_ENCODE(x)
    assert packed.shape == (32,) and exponent.shape == (2,)
    assert int(packed[16]) == 7 | (8 + 1) << 4 and int(exponent[1]) == 0


@pytest.mark.parametrize("at", [0, 70])
def test_nan_stays_in_its_place(at: int) -> None:
    got = FP8_SIM(jnp.ones(128).at[at].set(jnp.nan))
    assert np.flatnonzero(np.isnan(got)).tolist() == [at]


def test_hadamard_is_its_own_inverse_and_in_natural_order() -> None:
    matrix = jax.jit(rounding.hadamard)(jnp.eye(128)) * jnp.float32(128**0.5)
    index = np.arange(128)
    want = np.where(np.bitwise_count(index[:, None] & index) % 2, -1, 1)
    np.testing.assert_allclose(matrix, want, rtol=1e-6)


def test_half_precision_edges() -> None:
    # the default casts of NumPy are the reference: subnormals, ties, the largest value, overflow, signed zeros, infinities
    x = np.array([6e-8, 3e-8, 2.9e-8, 1e-20, -1e-5, 65504, 65519.9, 65520, -1e30, 2049, 2051, 0.0, -0.0, np.inf, -np.inf], np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(bits(jax.jit(rounding.f16_round)(x)), bits(want))
