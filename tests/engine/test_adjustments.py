"""Adjusted requests and log probabilities through the engine: with a scripted device, and exact with a real one, in any company."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ds4jax import Engine
from ds4jax.config import EngineConfig
from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import (
    NO_ADJUSTMENTS,
    Adjustments,
    Event,
    Finish,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Token,
    TokenLogprobs,
)
from ds4jax.serving.engine.core import EngineCore
from tests.engine.fakes import FakeClock, FakeDevice, alone, logprobs_of, run
from tests.model.oracle import SMOOTH
from tests.model.test_adjust import twin

GREEDY = SamplingParams(temperature=0.0, seed=0)
ASKED = Adjustments(presence_penalty=1.0)


def engine_over(device: FakeDevice) -> tuple[EngineCore, FakeClock]:
    clock = FakeClock()
    return EngineCore(
        device, EngineConfig(slots=device.n_slots, ctx=device.n_ctx, prefill_quantum=16, mixed_prefill_quantum=4), clock
    ), clock


# ---------------------------------------------------------------- a scripted device
def test_a_slot_is_told_of_every_session_that_moves_in() -> None:
    device = FakeDevice(n_slots=1)
    core, clock = engine_over(device)
    for adjustments in (ASKED, NO_ADJUSTMENTS):
        core.submit(GenerateRequest((1, 2), 2, GREEDY, adjustments=adjustments))
        run(core, clock)
        assert device.adjusted == {0: adjustments}
    core.submit(GenerateRequest((1, 2), 2, GREEDY, adjustments=ASKED))
    run(core, clock)
    core.open_session()
    assert device.adjusted == {0: NO_ADJUSTMENTS}


def test_a_slot_that_cannot_be_told_ends_its_request() -> None:
    device = FakeDevice(n_slots=1, fail_clear={0})
    core, clock = engine_over(device)
    first = core.submit(GenerateRequest((1, 2), 2, GREEDY, adjustments=ASKED))
    record = run(core, clock)
    assert record.finish(first).reason is FinishReason.ERROR
    device.fail_clear.clear()
    asked = GenerateRequest((1, 2), 2, GREEDY)
    second = core.submit(asked)
    assert run(core, clock).tokens(second) == alone(asked, device.n_ctx)


def test_log_probabilities_reach_those_who_want_them() -> None:
    core, clock = engine_over(FakeDevice())
    wanted = [None, 0, 3, None]
    ids = [core.submit(GenerateRequest((n, 5), 4, replace(GREEDY, logprobs=n_top))) for n, n_top in enumerate(wanted)]
    record = run(core, clock)
    for request_id, n_top in zip(ids, wanted, strict=True):
        tokens = [event for event in record.of(request_id) if isinstance(event, Token)]
        assert len(tokens) == 4
        assert [event.logprobs for event in tokens] == [None if n_top is None else logprobs_of(event.token, n_top) for event in tokens]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"adjustments": Adjustments(presence_penalty=float("nan"))}, "presence_penalty"),
        ({"adjustments": Adjustments(frequency_penalty=2.5)}, "frequency_penalty"),
        ({"adjustments": Adjustments(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"adjustments": Adjustments(min_tokens=-1)}, "min_tokens"),
        ({"adjustments": Adjustments(((97, 1.0),))}, "logit_bias"),
        ({"adjustments": Adjustments(((5, 101.0),))}, "logit_bias"),
        ({"adjustments": Adjustments(((5, 1.0),) * 301)}, "logit_bias"),
        ({"stop_token_ids": frozenset({97})}, "stop_token_ids"),
        ({"sampling": SamplingParams(logprobs=21)}, "logprobs"),
    ],
)
def test_what_no_slot_could_hold_is_refused(fields: dict[str, Any], param: str) -> None:
    core, _ = engine_over(FakeDevice())
    with pytest.raises(RequestError) as refused:
        core.submit(GenerateRequest((1,), 4, **fields))
    assert refused.value.param == param


# ---------------------------------------------------------------- a real one
RNG = np.random.default_rng(23)
PROMPTS = [tuple(RNG.integers(8, 512, n).tolist()) for n in (3, 17, 70, 130, 5, 33)]
KINDS = (
    NO_ADJUSTMENTS,
    Adjustments(repetition_penalty=1.8),
    Adjustments(frequency_penalty=1.5, presence_penalty=-0.5),
    Adjustments(((11, 6.0), (12, -100.0), (300, 4.0)), presence_penalty=2.0),
    Adjustments(min_tokens=9),
    Adjustments(((9, 3.0),), 0.7, 0.4, 0.6, 5),
)
N = 24


def generate(engine: Engine, requests: Sequence[GenerateRequest]) -> list[tuple[list[int], list[TokenLogprobs | None], FinishReason]]:
    """Run requests together; what each generated, and why it ended."""
    events = queue.SimpleQueue[Event]()
    ids = [engine.submit(request, events.put) for request in requests]
    told: dict[int, list[Token]] = {i: [] for i in ids}
    finishes: dict[int, FinishReason] = {}
    while len(finishes) < len(ids):
        event = events.get(timeout=60)
        if isinstance(event, Token):
            told[event.request_id].append(event)
        elif isinstance(event, Finish):
            finishes[event.request_id] = event.reason
    return [([e.token for e in told[i]], [e.logprobs for e in told[i]], finishes[i]) for i in ids]


def model_logits(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> list[np.ndarray]:
    """The model's logits for each token of a text and for the one after it."""
    with engine.open_session() as session:
        return [session.prefill(prompt), *(session.decode(token) for token in tokens)]


@pytest.fixture(scope="module")
def engine(engines: Callable[[str], Engine]) -> Engine:
    return engines(SMOOTH.name)


def test_texts_are_the_twins_in_any_company_and_nothing_compiles(engine: Engine) -> None:
    plain = [GenerateRequest(prompt, N, GREEDY) for prompt in PROMPTS]
    expected = [tokens for tokens, _, _ in generate(engine, plain)]
    asked = []
    for i, (prompt, adjustments) in enumerate(zip(PROMPTS, KINDS, strict=True)):
        stops = frozenset(expected[i][:2]) if adjustments.min_tokens else frozenset[int]()  # which it would draw at once
        asked.append(GenerateRequest(prompt, N, replace(GREEDY, logprobs=i if i % 2 else None), stops, adjustments))
    together = generate(engine, [*asked, *plain])
    assert [tokens for tokens, _, _ in together[len(asked) :]] == expected, "neighbours that ask for nothing"
    for request, (tokens, logprobs, finish) in zip(asked, together, strict=False):
        logits = model_logits(engine, request.prompt, tokens)
        drawn = list(tokens)
        if finish is FinishReason.STOP:
            assert len(tokens) >= request.adjustments.min_tokens
            drawn.append(int(twin(logits[-1], request, tokens).argmax()))
            assert drawn[-1] in request.stop_token_ids
        for n, token in enumerate(drawn):
            x = twin(logits[n], request, drawn[:n])
            assert x[token] >= x.max() - 1e-4, f"token {n} of {request.adjustments}"
        check_logprobs(logits, tokens, logprobs, request.sampling.logprobs)
    assert [tokens for tokens, _, _ in generate(engine, plain)] == expected, "slots that others have adjusted"
    again = [(tokens, finish) for tokens, _, finish in generate(engine, asked[::-1])[::-1]]
    assert again == [(tokens, finish) for tokens, _, finish in together[: len(asked)]]
    assert engine.stats().compile_misses == 0


def check_logprobs(
    logits: Sequence[np.ndarray], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], n_top: int | None
) -> None:
    for x, token, got in zip(logits, tokens, logprobs, strict=False):
        if n_top is None:
            assert got is None
            continue
        assert got is not None and len(got.top) == n_top
        expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert abs(got.logprob - expected[token]) < 1e-4
        np.testing.assert_allclose([value for _, value in got.top], np.sort(expected)[::-1][:n_top], atol=1e-4)
        np.testing.assert_allclose([value for _, value in got.top], expected[[i for i, _ in got.top]], atol=1e-4)
