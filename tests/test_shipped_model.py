"""The small model that comes with the package, asked a few questions of each kind: `ds4jax eval` in its shortest form.

Another training writes other words. What is asserted holds for any model that deserves to be shipped.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from functools import partial

import pytest

import ds4jax
from ds4jax.evals import measures
from ds4jax.evals.measures import GREEDY, Subject
from ds4jax.evals.report import QUICK
from ds4jax.evals.run import Question
from ds4jax.model.gguf.reader import GGUFFile
from ds4jax.serving.engine.api import Event, Finish, GenerateRequest, SamplingParams, Token
from ds4jax.serving.engine.device import Chunk, Row
from ds4jax.serving.engine.local import program_directory
from ds4jax.serving.engine.programs import ProgramStore
from ds4jax.serving.engine.runner import Runner
from ds4jax.text import Message, render, stop_ids, to_ids, to_text
from ds4jax.text.dsml import CallCollector, CallZones, DsmlParser, Rejected, Tool, call_opening
from tests.compiler import compiled_as_users_do

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """The model in a small engine, with the rounded cache rows that it is served with: they make a lot of a bit that differs.

    Compiled as users do: it reads some fifteen thousand tokens here, five times as fast.
    """
    with compiled_as_users_do():
        engine = ds4jax.Engine(ds4jax.load_model(ds4jax.small_model()), slots=2, ctx=2048)
    with engine:
        yield Subject(engine, 2)


def test_the_file_is_small_and_says_whose_it_is() -> None:
    assert ds4jax.small_model().stat().st_size <= 20e6
    metadata = GGUFFile(ds4jax.small_model()).metadata
    assert metadata["general.license"] == "mit"
    assert "SmolLM2-135M-Instruct (Apache-2.0)" in str(metadata["general.description"])


def test_it_writes_text(subject: Subject) -> None:
    assert measures.stories_without_loops(subject, 2, n_token=50) == 2


def test_it_greets(subject: Subject) -> None:
    (reply,) = subject.ask([Question((Message("user", "Hello!"),), GREEDY, 40)])
    assert reply.stopped and "help" in reply.content


def test_it_calls_tools(subject: Subject) -> None:
    readable, _ = measures.tool_calls(subject, 2)
    assert readable == 2


def test_it_recalls_from_far_beyond_its_window(subject: Subject) -> None:
    """Of what stands further back than 128 tokens only compressed rows tell: a model that has not learnt to look there gets no key."""
    for distance in (500, 1500):
        assert measures.recalled(subject, QUICK.recall, distance) >= QUICK.recall - 2


def test_it_closes_its_thoughts(subject: Subject) -> None:
    assert measures.thoughts_closed(subject, 1) == 1


def test_a_reply_is_the_same_alone_and_in_company(subject: Subject) -> None:
    assert measures.same_in_company(subject, 2, n_token=12) == 2


def test_buckets_agree_bit_for_bit(subject: Subject) -> None:
    """Two prompts read one after the other and decoded alone, or read in a pack and decoded together."""
    first = subject.engine.runner
    with compiled_as_users_do():  # products and sums are rounded at once, or not, by LLVM's optimiser; finds the engine's programs on disk
        runner = Runner(first.model, first.shapes, ProgramStore(program_directory()))
    text = subject.tokenizer.encode("Once upon a time there was a small dog who lived by the sea. " * 6)
    prompts, seen = (text[:90], text[5:70]), []
    for n in (1, 2):
        for slot in range(2):
            runner.clear(slot)
        chunks = [Chunk(slot, prompt, GREEDY) for slot, prompt in enumerate(prompts)]
        for begin in range(0, 2, n):
            runner.prefill(chunks[begin : begin + n])
        seen.append([runner.decode([Row(slot, token, GREEDY) for slot in range(n)]).logits()[0].tobytes() for token in text[:9]])
    assert seen[0] == seen[1]


def test_a_hot_call_has_the_structure_that_the_model_prefers(subject: Subject) -> None:
    schema = '{"name":"get_price","parameters":{"type":"object","properties":{"item":{"type":"string"}},"required":["item"]}}'
    question = render([Message("user", "How much is a lamp?")], thinking=False, tools=[Tool("get_price", schema)])
    tokenizer, opening = subject.tokenizer, to_text(call_opening("get_price"))
    begin = partial(CallZones, tokenizer.token_bytes, opening)
    prompt, events = tuple(to_ids([*question, *call_opening("get_price")], tokenizer)), queue.SimpleQueue[Event]()
    drawn: dict[int, list[Token]] = {}
    for seed in range(2):
        sampling = SamplingParams(temperature=1.5, seed=seed, logprobs=1)
        request = GenerateRequest(prompt, 30, sampling, stop_ids(tokenizer, thinking=False), zones=begin)
        drawn[subject.engine.submit(request, events.put)] = []
    n_ended = 0
    while n_ended < len(drawn):
        event = events.get(timeout=60)
        n_ended += isinstance(event, Finish)
        if isinstance(event, Token):
            drawn[event.request_id].append(event)
    items = set()
    for tokens in drawn.values():
        zones, parser, calls = begin(), DsmlParser(lambda: "id"), CallCollector()
        told = parser.feed(opening)
        for token in tokens:
            assert token.logprobs is not None
            if zones.is_greedy:
                assert token.token == token.logprobs.top[0][0]
            zones.take(token.token)
            told += parser.feed(tokenizer.token_bytes(token.token).decode(errors="replace"))
        calls.take(event for event in told if not isinstance(event, str | Rejected))
        (call,) = calls.calls
        assert list(json.loads(call.arguments)) == ["item"]
        items.add(call.arguments)
    assert len(items) > 1, "what is asked for varies with the seed"
