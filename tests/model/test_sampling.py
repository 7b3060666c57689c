"""Drawing tokens: what may be drawn, how often, and what makes a draw the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.model.sampling import UNUSABLE, RowSampling, sample
from ds4jax.serving.engine.api import SamplingParams
from ds4jax.serving.engine.batch import decode_control, unpack_decode
from ds4jax.serving.engine.device import Row

pytestmark = pytest.mark.smoke
B, V = 4096, 24
_sample = jax.jit(sample)


def draw(logits: np.ndarray, params: list[SamplingParams], position: np.ndarray | None = None) -> np.ndarray:
    """Draw with the control array that real steps use; rows are repeated up to one compiled size."""
    n = len(params)
    rows = [Row(i, 0, params[i % n]) for i in range(B)]
    _, sampling = unpack_decode(jnp.asarray(decode_control(rows, B, B)))
    where = np.arange(B) if position is None else np.resize(position, B)
    padded = np.resize(logits, (B, logits.shape[-1])).astype(np.float32)
    return np.asarray(_sample(padded, sampling, where.astype(np.int32)))


def probabilities(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """What a row's tokens should come out with: temperature, then top-k, top-p of the rest, and min-p against the best."""
    weight = np.exp((logits.astype(np.float64) - logits.max()) / p.temperature)
    order = np.argsort(-weight, kind="stable")
    keep = np.zeros(len(weight), bool)
    kept = order[: p.top_k or None]
    mass = np.cumsum(weight[kept]) / weight[kept].sum()
    keep[kept[: np.searchsorted(mass, p.top_p * (1 - 1e-9)) + 1]] = True
    keep &= weight >= p.min_p
    weight = np.where(keep, weight, 0)
    return weight / weight.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, min_p=0.0),
        SamplingParams(0.4, min_p=0.0),
        SamplingParams(2.5, min_p=0.1),
        SamplingParams(1.0, top_k=3, min_p=0.0),
        SamplingParams(1.0, top_p=0.6, min_p=0.0),
        SamplingParams(1.5, top_k=9, top_p=0.8, min_p=0.02),
    ],
    ids=repr,
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    logits = np.random.default_rng(5).normal(0, 1.5, V)
    want = probabilities(logits, params)
    seeds = [SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed) for seed in (1, 2**31 + 5, 77)]
    drawn = np.concatenate([draw(logits, [s]) for s in seeds])
    seen = np.bincount(drawn, minlength=V)
    assert not seen[want == 0].any(), "a token was drawn that the filters exclude"
    live = want > 0
    expected = want[live] * len(drawn)
    chi2 = float((np.square(seen[live] - expected) / expected).sum())
    assert chi2 < live.sum() + 6 * np.sqrt(2 * live.sum() + 1), f"chi-square {chi2:.0f} over {live.sum()} tokens"


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(0, V), st.sampled_from([0.05, 0.3, 0.9, 1.0]), st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_only_kept_tokens_are_drawn(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, V)
    params = SamplingParams(1.0, top_k, top_p, min_p, seed)
    drawn = np.unique(draw(logits, [params]))
    assert set(drawn) <= set(np.flatnonzero(probabilities(logits, params)))


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((2, V))
    logits[0, [5, 9]] = 3
    logits[1, [23, 2]] = 1
    got = draw(logits, [SamplingParams(0.0), SamplingParams(0.0)])
    assert got[0] == 5 and got[1] == 2


@pytest.mark.parametrize("n_vocab", [V, 4096])
def test_unusable_rows_say_so_and_do_not_touch_their_neighbours(n_vocab: int) -> None:
    good, index = np.random.default_rng(0).normal(0, 1, n_vocab), np.arange(n_vocab)
    rows = np.stack(
        [np.where(index == 3, np.nan, good), np.full(n_vocab, 2.0), np.full(n_vocab, np.nan), np.where(index == 0, np.inf, good), good]
    )
    for temperature in (0.0, 1.0):
        got = draw(rows, [SamplingParams(temperature, seed=1)] * 5, np.full(5, 8))
        assert got[:4].tolist() == [UNUSABLE] * 4
        assert got[4] == draw(good, [SamplingParams(temperature, seed=1)], np.full(1, 8))[0] >= 0


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = np.random.default_rng(3).normal(0, 1, V)
    params = [SamplingParams(1.0, min_p=0.0, seed=s) for s in range(64)]
    position = np.arange(64) + 100
    forward = draw(logits, params, position)[:64]
    backward = draw(logits, params[::-1], position[::-1])[:64]
    np.testing.assert_array_equal(forward, backward[::-1])
    assert (
        len(set(draw(logits, [SamplingParams(1.0, min_p=0.0, seed=2**40 + 1)], position)[:64] == draw(logits, [params[1]], position)[:64]))
        == 2
    )


def test_noise_is_uniform_over_a_wide_vocabulary() -> None:
    """All logits but one equal: every token comes up as often, whatever the seed's bits look like."""
    wide = 512
    logits = jnp.zeros((B, wide), jnp.float32).at[:, 0].set(-100.0)
    number = jnp.asarray(np.array([[1.0], [1.0], [0.0]], np.float32) * np.ones((1, B), np.float32))
    counts = np.zeros(wide)
    for seed in (0, 1, 0xFFFFFFFF, 0x80000000):
        code = jnp.asarray(np.array([[0], [seed], [0], [0]], np.uint32) * np.ones((1, B), np.uint32))
        counts += np.bincount(np.asarray(_sample(logits, RowSampling(number, code), jnp.arange(B))), minlength=wide)
    expected = 4 * B / (wide - 1)
    chi2 = float((np.square(counts[1:] - expected) / expected).sum())
    assert abs(chi2 - (wide - 2)) < 6 * np.sqrt(2 * wide), f"chi-square {chi2:.0f} over {wide - 1} tokens"
