"""Penalties, biases and minimum lengths against vLLM's formulas in NumPy, and what other rows and steps may not change."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.model.adjust import EARLY, SlotAdjustments, adjust, count_drawn, init_adjustments, set_slot
from ds4jax.model.draw import draw
from ds4jax.model.mask import RowMask, n_words
from ds4jax.model.sampling import UNUSABLE, RowSampling, sample
from ds4jax.serving.engine.api import NO_ADJUSTMENTS, Adjustments, GenerateRequest, SamplingParams
from ds4jax.serving.engine.batch import decode_control, slot_adjustments, unpack_decode, unpack_mask
from ds4jax.serving.engine.device import Row
from tests.model.lowering import lower_for_cuda

pytestmark = pytest.mark.smoke
S, B, V = 5, 4, 24
_adjust, _count, _set_slot, _sample = jax.jit(adjust), jax.jit(count_drawn), jax.jit(set_slot), jax.jit(sample)
_draw = jax.jit(draw)
ALL = Adjustments(((3, 5.0), (4, -100.0)), 1.5, 0.3, 0.7, 4)


def begin(state: SlotAdjustments, slot: int, request: GenerateRequest | None) -> SlotAdjustments:
    return _set_slot(state, slot_adjustments(request, V), np.int32(slot))


def twin(logits: np.ndarray, request: GenerateRequest, generated: list[int]) -> np.ndarray:
    """The logits that a request's next token is drawn from, as vLLM computes them."""
    a, x = request.adjustments, logits.astype(np.float64)
    for token, bias in a.logit_bias:
        x[token] += bias
    for token in {*request.prompt, *generated}:
        x[token] = x[token] / a.repetition_penalty if x[token] > 0 else x[token] * a.repetition_penalty
    for token in set(generated):
        x[token] -= a.frequency_penalty * generated.count(token) + a.presence_penalty
    if len(generated) < a.min_tokens:
        x[list(request.stop_token_ids)] = EARLY
    return x


tokens = st.integers(0, V - 1)
adjustments = st.builds(
    Adjustments,
    st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5).map(lambda bias: tuple(bias.items())),
    st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    st.integers(0, 6),
)
requests = st.builds(
    GenerateRequest,
    st.lists(tokens, min_size=1, max_size=12).map(tuple),
    st.none(),
    st.just(SamplingParams(seed=1)),
    st.frozensets(tokens, max_size=3),
    adjustments,
)
ROWS = np.arange(B, dtype=np.int32)


@settings(max_examples=60)
@given(st.lists(st.none() | requests, min_size=B, max_size=B), st.integers(0, 2**32 - 1), st.permutations(range(S)))
def test_logits_follow_the_formulas_whoever_sits_beside(given_rows: list[GenerateRequest | None], seed: int, slots: list[int]) -> None:
    rng = np.random.default_rng(seed)
    state = init_adjustments(S, V)
    for slot in range(S):  # somebody sat there before
        state = begin(state, slot, GenerateRequest((1, 2), adjustments=ALL, stop_token_ids=frozenset({5})))
    slot = np.array(slots[:B], np.int32)
    for s, request in zip(slot, given_rows, strict=True):
        state = begin(state, s, request)
    n_prompt = np.array([len(request.prompt) if request else 7 for request in given_rows], np.int32)
    generated: list[list[int]] = [[] for _ in ROWS]
    for step in range(5):
        logits = rng.normal(0, 3, (B, V)).astype(np.float32)
        got = np.asarray(_adjust(state, logits, slot, n_prompt + step))
        for row, request in enumerate(given_rows):
            if request is None:
                assert got[row].tobytes() == logits[row].tobytes()
            else:
                np.testing.assert_allclose(got[row], twin(logits[row], request, generated[row]), rtol=2e-6, atol=2e-5)
        token = rng.integers(0, V // 4, B).astype(np.int32)
        state = _count(state, slot, n_prompt + step, token)
        for row in ROWS:
            generated[row].append(int(token[row]))


def test_padding_and_what_is_drawn_inside_a_prompt_count_nowhere() -> None:
    state = begin(init_adjustments(S, V), 2, GenerateRequest((1,) * 9, adjustments=ALL))
    token, position = np.full(B, 6, np.int32), np.array([9, 8, 9, 9], np.int32)
    for slot in ([S, 2, S, 0], [0, 1, 3, 4]):  # padding, the middle of the prompt, slots that ask for nothing
        after = _count(state, np.array(slot, np.int32), position, token)
        np.testing.assert_array_equal(after.seen, state.seen)
    unusable = _count(state, np.array([2, 0, 1, 3], np.int32), position, np.full(B, UNUSABLE, np.int32))
    np.testing.assert_array_equal(unusable.seen, state.seen)
    counted = _count(state, np.array([2, 0, 1, 3], np.int32), position, token)
    assert np.argwhere(np.asarray(counted.seen != state.seen)).tolist() == [[2, 6]]


@settings(max_examples=30)
@given(
    st.lists(st.none() | requests, min_size=B, max_size=B), st.integers(0, B - 1), st.sampled_from([0.0, 1.0]), st.sampled_from([None, 5])
)
def test_a_draw_is_the_same_whoever_sits_beside(
    given_rows: list[GenerateRequest | None], row: int, temperature: float, n_top: int | None
) -> None:
    logits = np.random.default_rng(row).normal(0, 3, (B, V)).astype(np.float32)
    position = np.array([len(request.prompt) if request else 7 for request in given_rows], np.int32)

    def drawn(beside: list[GenerateRequest | None], n_top_beside: int | None) -> tuple[bytes, ...]:
        state = init_adjustments(S, V)
        for slot, request in enumerate(beside):
            state = begin(state, slot, request)
        rows = [Row(i, 0, SamplingParams(temperature, seed=i, logprobs=n_top if i == row else n_top_beside)) for i in range(B)]
        control = jnp.asarray(decode_control(rows, B, S))
        _, sampling = unpack_decode(control)
        mask = unpack_mask(control, jnp.zeros((S, n_words(V)), jnp.uint32), jnp.zeros(B, jnp.int32))
        token, scores, state = _draw(logits, sampling, state, mask, ROWS, position)
        wanted = scores[row] if n_top else scores[:0]
        return tuple(np.asarray(part).tobytes() for part in (token[row], wanted, state.seen[row]))

    alone = [request if i == row else None for i, request in enumerate(given_rows)]
    assert drawn(given_rows, 3) == drawn(alone, None)


def test_a_slot_that_is_reset_is_as_new() -> None:
    request = GenerateRequest((1, 2), adjustments=ALL, stop_token_ids=frozenset({5}))
    state = begin(begin(init_adjustments(S, V), 2, request), 2, None)
    for got, new in zip(jax.tree.leaves(state), jax.tree.leaves(init_adjustments(S, V)), strict=True):
        np.testing.assert_array_equal(got, new)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_drawn_obeys_and_the_models_own_logits_decide_what_is_usable(temperature: float) -> None:
    state = init_adjustments(S, V)
    stops = frozenset({0})
    for slot in range(3):
        state = begin(state, slot, GenerateRequest((1,), stop_token_ids=stops, adjustments=Adjustments(((7, 100.0),), min_tokens=2)))
    state = begin(state, 3, GenerateRequest((1,), stop_token_ids=stops, adjustments=Adjustments(min_tokens=2)))
    logits = np.zeros((B, V), np.float32)
    logits[1:, 0] = 50.0  # row 0 is all equal, which no bias mends
    rows = [Row(i, 0, SamplingParams(temperature, min_p=0.0, seed=i)) for i in range(B)]
    _, sampling = unpack_decode(jnp.asarray(decode_control(rows, B, S)))

    def drawn(position: int) -> list[int]:
        at = np.full(B, position, np.int32)
        return np.asarray(_sample(logits, sampling, at, _adjust(state, logits, ROWS, at))).tolist()

    assert drawn(2)[:3] == [UNUSABLE, 7, 7] and drawn(2)[3] != 0
    assert drawn(3) == [UNUSABLE, 7, 7, 0]


def test_nothing_asked_is_nothing_uploaded() -> None:
    assert replace(ALL, min_tokens=0) != NO_ADJUSTMENTS == Adjustments()
    for one, new in zip(jax.tree.leaves(slot_adjustments(GenerateRequest((1,)), V)), jax.tree.leaves(init_adjustments(1, V)), strict=True):
        np.testing.assert_array_equal(one, new)


def test_a_gpu_is_not_asked_to_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    state = jax.eval_shape(lambda: init_adjustments(S, V))
    row = jax.ShapeDtypeStruct((B,), jnp.int32)
    sampling = RowSampling(jax.ShapeDtypeStruct((3, B), jnp.float32), jax.ShapeDtypeStruct((4, B), jnp.uint32))
    mask = RowMask(jax.ShapeDtypeStruct((S, n_words(V)), jnp.uint32), row, row, row)
    shapes = (jax.ShapeDtypeStruct((B, V), jnp.float32), sampling, state, mask, row, row)

    def branches(text: str) -> bool:
        return any(f"stablehlo.{kind}" in text for kind in ("case", "if", "while", "sort"))

    assert branches(jax.jit(draw).trace(*shapes).lower().as_text())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not branches(lower_for_cuda(monkeypatch, lambda *args: draw(*args), *shapes))
