"""Greedy texts do not depend on company, and traffic of any kind compiles nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest

from ds4jax import Engine
from ds4jax.serving.engine.api import NO_ADJUSTMENTS, Adjustments, Event, Finish, FinishReason, GenerateRequest, SamplingParams, Token
from tests.model.oracle import SMOOTH

Text = list[int]
RNG = np.random.default_rng(11)
LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 127, 130)
PROMPTS = [tuple(RNG.integers(8, 512, n).tolist()) for n in LENGTHS]
GREEDY = SamplingParams(temperature=0.0)
N = 80  # long enough that most of them run together


@pytest.fixture(scope="module")
def engine(engines: Callable[[str], Engine]) -> Engine:
    return engines(SMOOTH.name)


class Texts:
    """Collect what requests generate."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._events = engine, queue.SimpleQueue[Event]()
        self._open: set[int] = set()
        self.text: dict[int, Text] = {}
        self.finish: dict[int, Finish] = {}

    def submit(
        self, prompt: Sequence[int], n: int = N, sampling: SamplingParams = GREEDY, adjustments: Adjustments = NO_ADJUSTMENTS
    ) -> int:
        request = self._engine.submit(GenerateRequest(tuple(prompt), n, sampling, adjustments=adjustments), self._events.put)
        self._open.add(request)
        self.text[request] = []
        return request

    def next(self) -> None:
        """Take one event."""
        event = self._events.get(timeout=60)
        if isinstance(event, Token):
            self.text[event.request_id].append(event.token)
        elif isinstance(event, Finish):
            self.finish[event.request_id] = event
            self._open.remove(event.request_id)

    def wait(self) -> None:
        while self._open:
            self.next()


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[Text]:
    """Each prompt's text when nobody else is there."""
    texts = Texts(engine)
    out = []
    for prompt in PROMPTS:
        request = texts.submit(prompt)
        texts.wait()
        out.append(texts.text[request])
    assert len({tuple(text) for text in out}) == len(out)
    return out


@pytest.mark.parametrize("order", [range(16), range(15, -1, -1), (3, 15, 8, 0, 11, 6, 1, 14)], ids=["together", "reversed", "half"])
def test_texts_are_the_same_in_company(engine: Engine, alone: list[Text], order: Sequence[int]) -> None:
    before = engine.stats().steps
    texts = Texts(engine)
    requests = {i: texts.submit(PROMPTS[i]) for i in order}
    texts.wait()
    for i, request in requests.items():
        assert texts.text[request] == alone[i], f"prompt {i} of {len(PROMPTS[i])} tokens"
    largest = max(bucket for bucket, n in engine.stats().steps.items() if n > before.get(bucket, 0))
    assert largest >= len(order) // 2, "the requests did not run together"


def test_texts_are_the_same_while_neighbours_join_and_leave(engine: Engine, alone: list[Text]) -> None:
    texts = Texts(engine)
    wanted, passing = {}, []
    for i, prompt in enumerate(PROMPTS):
        wanted[i] = texts.submit(prompt)
        passing.append(texts.submit(RNG.integers(8, 512, 1 + 5 * i).tolist(), n=200 if i % 2 else 3))
        while len(texts.text[wanted[i]]) < 2:  # the next one joins when this one is under way
            texts.next()
        if i % 2:
            engine.cancel(passing[-1])
    texts.wait()
    for i, request in wanted.items():
        assert texts.text[request] == alone[i], f"prompt {i} of {len(PROMPTS[i])} tokens"
    assert {texts.finish[p].reason for p in passing} == {FinishReason.CANCELLED, FinishReason.LENGTH}


def test_a_seeded_text_is_the_same_in_company(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=2**40 + 7)
    texts = Texts(engine)
    first = texts.submit(PROMPTS[5], 24, sampling)
    texts.wait()
    crowd = [texts.submit(prompt, 30) for prompt in PROMPTS[6:12]]
    second = texts.submit(PROMPTS[5], 24, sampling)
    other = texts.submit(PROMPTS[5], 24, replace(sampling, seed=8))
    texts.wait()
    assert texts.text[first] == texts.text[second] != texts.text[other]
    assert all(len(texts.text[request]) == 30 for request in crowd)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of what jax compiles while the test runs."""
    seen: list[str] = []
    listening = True

    def note(event: str, duration: float, **_: object) -> None:
        if listening and "compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    listening = False  # listeners cannot be taken back


def test_mixed_traffic_compiles_nothing(engine: Engine, compilations: list[str]) -> None:
    texts = Texts(engine)
    for i, prompt in enumerate(PROMPTS + PROMPTS):
        sampling = SamplingParams((0.0, 0.7, 2.0)[i % 3], i % 5, (1.0, 0.5)[i % 2], 0.1 * (i % 3), logprobs=(None, 0, 20, 3)[i % 4])
        adjustments = Adjustments(((i, 1.0),) * (i % 2), 1.0 + i % 3, 0.1 * (i % 5), min_tokens=i % 7) if i % 6 else NO_ADJUSTMENTS
        texts.submit(prompt, 1 + i % 7, sampling, adjustments)
    texts.wait()
    with engine.open_session() as session:
        session.prefill(PROMPTS[9])
        session.decode(1)
    assert engine.stats().compile_misses == 0
    assert compilations == []
    jax.jit(lambda x: x + len(texts.text))(1.5)
    assert compilations, "the listener hears nothing"


def test_threads_that_decode_together_share_batches(engine: Engine) -> None:
    before = engine.stats()
    ready = threading.Barrier(3)

    def decode(tokens: Sequence[int]) -> None:
        with engine.open_session() as session:
            ready.wait(30)
            for token in tokens:
                session.decode(token)

    threads = [threading.Thread(target=decode, args=(PROMPTS[i][:20],), daemon=True) for i in (8, 9, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    after = engine.stats()
    rows = {b: n - before.rows.get(b, 0) for b, n in after.rows.items()}
    assert sum(rows.values()) == 60
    assert rows.get(4, 0) >= 45, f"rows by bucket: {rows}"
