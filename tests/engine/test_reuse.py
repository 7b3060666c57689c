"""Reuse through the public engine: the very same answers as without it, for everybody, whoever else is there."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ds4jax import Engine
from ds4jax.serving.engine.api import Event, Finish, GenerateRequest, SamplingParams, Started, Token, TokenLogprobs
from tests.model.oracle import SMOOTH, engine_config

RNG = np.random.default_rng(7)
SYSTEM = tuple(RNG.integers(8, 512, 150).tolist())
SCORED = SamplingParams(temperature=0.0, seed=1, logprobs=3)
N = 12

Answer = list[tuple[int, TokenLogprobs | None]]


@pytest.fixture(scope="module")
def engine(engines: Callable[[str], Engine]) -> Engine:
    return engines(SMOOTH.name)


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Engine]:
    """An engine that returns to nothing."""
    with Engine(SMOOTH.load(), config=replace(engine_config(SMOOTH.name), slots=16, snapshots=0)) as engine:
        yield engine


def ask(engine: Engine, *prompts: Sequence[int], cancel: Sequence[int] = ()) -> list[tuple[int, Answer]]:
    """Ask all at once: tokens found in the cache, and the answer, of each. Those in `cancel` are given up as soon as they begin."""
    events = queue.SimpleQueue[Event]()
    order = {engine.submit(GenerateRequest(tuple(prompt), N, SCORED), events.put): i for i, prompt in enumerate(prompts)}
    answers: list[Answer] = [[] for _ in prompts]
    n_cached = [0] * len(prompts)
    n_open = len(prompts)
    while n_open:
        event = events.get(timeout=60)
        i = order[event.request_id]
        if isinstance(event, Token):
            answers[i].append((event.token, event.logprobs))
        elif isinstance(event, Started) and i in cancel:
            engine.cancel(event.request_id)
        elif isinstance(event, Finish):
            assert event.error is None
            n_cached[i], n_open = event.n_cached, n_open - 1
    return list(zip(n_cached, answers, strict=True))


def tokens(answer: Answer) -> list[int]:
    return [token for token, _ in answer]


@pytest.mark.parametrize("n", [20, 65, 127, 128, 129, 130, 150])
def test_an_answer_that_is_asked_for_again_has_the_same_bits(engine: Engine, n: int) -> None:
    """Rewound, and forked while the slot of the first is busy with the same prompt. Chunks end where they did, so the bits are equal."""
    prompt = RNG.integers(8, 512, n).tolist()
    ((n_cold, cold),) = ask(engine, prompt)
    ((n_warm, warm),) = ask(engine, prompt)
    assert (n_cold, warm) == (0, cold) and n_warm >= n - engine.runner.prefill_buckets[0]
    before = engine.stats().reuses.get("fork", 0)
    assert [tokens(answer) for _, answer in ask(engine, prompt, prompt, prompt)] == [tokens(cold)] * 3
    assert engine.stats().reuses["fork"] >= before + 2


def test_eight_clients_that_share_a_prompt_never_see_one_another(engine: Engine, forgetful: Engine) -> None:
    """Each has a canary of its own behind the system prompt. Some leave half way, and all come back with a second turn."""
    prompts = [(*SYSTEM, *[300 + i] * 9, *RNG.integers(8, 512, 5 * i).tolist()) for i in range(8)]
    expected = [tokens(answer) for _, answer in ask(forgetful, *prompts)]
    assert len({tuple(text) for text in expected}) == 8
    before = engine.stats()
    first = ask(engine, *prompts, cancel=(2, 5))
    for i, (_, answer) in enumerate(first):
        assert tokens(answer) == expected[i][: len(answer)] and (i in (2, 5) or len(answer) == N)
    n_computed = engine.stats().prefill_tokens - before.prefill_tokens
    assert n_computed <= 1.1 * len(SYSTEM) + sum(len(p) - len(SYSTEM) for p in prompts) + 8 * engine.runner.prefill_buckets[0]

    turns = [(*prompt, *text[:-1], 9, 9, 9) for prompt, text in zip(prompts, expected, strict=True)]
    want = [tokens(answer) for _, answer in ask(forgetful, *turns)]
    got = ask(engine, *turns)
    assert [tokens(answer) for _, answer in got] == want
    stayed = [i for i in range(8) if i not in (2, 5)]
    assert all(got[i][0] == len(turns[i]) - 3 for i in stayed), "a conversation did not go on in its slot"
    assert engine.stats().compile_misses == 0
