"""Masked logits against the bits spelled out, and what rows that no mask asks for keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.model.adjust import EARLY, init_adjustments, set_slot
from ds4jax.model.draw import draw
from ds4jax.model.mask import ALWAYS, NEVER, RowMask, mask_logits, n_words
from ds4jax.serving.engine.api import Adjustments, GenerateRequest, SamplingParams
from ds4jax.serving.engine.batch import decode_control, slot_adjustments, unpack_decode, unpack_mask
from ds4jax.serving.engine.device import MASKED, UNMASKED, MaskRule, Row

pytestmark = pytest.mark.smoke
S, B, V = 5, 4, 70  # words of 32 bits that the vocabulary does not fill
_mask, _draw = jax.jit(mask_logits), jax.jit(draw)
ROWS = np.arange(B, dtype=np.int32)


def packed(allowed: np.ndarray) -> np.ndarray:
    """Pack bool [S, V] as the host does, from bytes of little-endian words."""
    bits = np.zeros((len(allowed), n_words(V) * 32), bool)
    bits[:, :V] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


rules = st.tuples(st.sampled_from([NEVER, ALWAYS, 3, 8]), st.sampled_from([NEVER, 5, 69]))


@settings(max_examples=60)
@given(st.lists(rules, min_size=B, max_size=B), st.permutations(range(S + 1)), st.integers(0, 2**32 - 1))
def test_what_may_not_be_drawn_becomes_minus_infinity(given_rules: list[tuple[int, int]], slots: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    allowed, logits = rng.random((S, V)) < 0.5, rng.normal(size=(B, V)).astype(np.float32)
    fed = rng.choice([3, 8, 9], B).astype(np.int32)
    slot = np.array(slots[:B], np.int32)  # one may be out of range
    after, barred = (np.array(column, np.int32) for column in zip(*given_rules, strict=True))
    got = np.asarray(_mask(logits, RowMask(packed(allowed), fed, after, barred), slot))
    for row in ROWS:
        expected = logits[row].copy()
        if after[row] in (ALWAYS, fed[row]):
            expected[~allowed[min(slot[row], S - 1)]] = -np.inf
        elif after[row] != NEVER and barred[row] != NEVER:
            expected[barred[row]] = -np.inf
        assert got[row].tobytes() == expected.tobytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_stays_within_the_mask_whatever_else_is_asked(temperature: float) -> None:
    """Biases and minimum lengths shape what the mask leaves; where it leaves an early end alone, the end comes."""
    end, only = 7, 40
    allowed = np.zeros((S, V), bool)
    allowed[0, [end, only]], allowed[1, end], allowed[2, only] = True, True, True
    asked = GenerateRequest((1,), adjustments=Adjustments(((9, 100.0), (only, -100.0)), min_tokens=5), stop_token_ids=frozenset({end}))
    state = init_adjustments(S, V)
    for slot in range(3):
        state = set_slot(state, slot_adjustments(asked, V), jnp.int32(slot))
    rows = [Row(slot, 2, SamplingParams(temperature, seed=slot), MASKED if slot < 3 else UNMASKED) for slot in range(B)]
    control = jnp.asarray(decode_control(rows, B, S))
    mask = unpack_mask(control, jnp.asarray(packed(allowed)), jnp.full(B, 2))
    logits = np.zeros((B, V), np.float32)
    logits[:, end], logits[:, 9] = 30.0, 60.0
    token, _, _ = _draw(logits, unpack_decode(control)[1], state, mask, ROWS, np.full(B, 2, np.int32))
    assert np.asarray(token).tolist() == [only, end, only, 9]
    assert EARLY < -1e20, "an early end loses to anything else that a mask allows"


def test_a_mask_that_waits_for_a_token_holds_from_the_step_that_feeds_it() -> None:
    marker, end = 3, 7
    allowed = np.zeros((S, V), bool)
    allowed[:, 50] = True
    rule = MaskRule(marker, end)
    control = jnp.asarray(decode_control([Row(s, None, SamplingParams(0.0, seed=0), rule) for s in range(B)], B, S))
    fed = jnp.array([marker, 4, end, marker], jnp.int32)
    mask = unpack_mask(control, jnp.asarray(packed(allowed)), fed)
    logits = np.zeros((B, V), np.float32)
    logits[:, end], logits[:, 9] = 2.0, 1.0
    token, _, _ = _draw(logits, unpack_decode(control)[1], init_adjustments(S, V), mask, ROWS, np.full(B, 2, np.int32))
    assert np.asarray(token).tolist() == [50, 9, 9, 50]


def test_padding_asks_for_no_mask() -> None:
    control = decode_control([Row(0, 1, SamplingParams(seed=0), MASKED)], B, S)
    mask = unpack_mask(jnp.asarray(control), jnp.zeros((S, n_words(V)), jnp.uint32), jnp.zeros(B, jnp.int32))
    assert np.asarray(mask.asking).tolist() == [True, False, False, False]
