"""Constrained texts of a real model: whatever it is asked for, what it writes can be read and is valid; and its neighbours never notice."""

from __future__ import annotations

import itertools
import json
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4jax import Engine
from ds4jax.serving.engine.api import Adjustments, Constraint, Event, Finish, FinishReason, GenerateRequest, SamplingParams, Token
from ds4jax.text.grammar import Grammar, GrammarCompiler
from tests.model.oracle import SMOOTH

RNG = np.random.default_rng(31)
PROMPTS = [tuple(RNG.integers(8, 512, n).tolist()) for n in (3, 17, 70, 33)]
GREEDY = SamplingParams(temperature=0.0, seed=0)
N = 500

JsonSchema = dict[str, Any]
Result = tuple[list[int], FinishReason]

scalars = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 'a "b"\n'}, {"enum": [1, "é", None, [2]]}]),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, st.integers(-50, 50), st.integers(0, 99)),
    st.just({"type": "string", "pattern": "^[a-f]{2,3}$"}),
)


def _object(properties: dict[str, JsonSchema], n_required: int) -> JsonSchema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:n_required],
        "additionalProperties": False,
    }


schemas: st.SearchStrategy[JsonSchema] = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2)),
        st.builds(_object, st.dictionaries(st.sampled_from(["a", "é", "two words", '"']), inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda left, right: {"anyOf": [left, right]}, inner, inner),
    ),
    max_leaves=4,
)


def generate(engine: Engine, requests: Sequence[GenerateRequest]) -> list[Result]:
    """Run requests together; what each generated, and why it ended."""
    events = queue.SimpleQueue[Event]()
    ids = [engine.submit(request, events.put) for request in requests]
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    finishes: dict[int, Finish] = {}
    while len(finishes) < len(ids):
        event = events.get(timeout=60)
        if isinstance(event, Token):
            tokens[event.request_id].append(event.token)
        elif isinstance(event, Finish):
            assert event.reason is not FinishReason.ERROR, event.error
            finishes[event.request_id] = event
    return [(tokens[i], finishes[i].reason) for i in ids]


@pytest.fixture(scope="module")
def engine(engines: Callable[[str], Engine]) -> Engine:
    return engines(SMOOTH.name)


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> GrammarCompiler:
    return GrammarCompiler(engine.model.tokenizer)


@pytest.fixture(scope="module")
def free(engine: Engine) -> list[tuple[GenerateRequest, Result]]:
    """Requests that ask for nothing, and what each is given alone."""
    asked = [GenerateRequest(prompt, 60, SamplingParams(temperature=i % 2, seed=i)) for i, prompt in enumerate(PROMPTS)]
    return [(request, generate(engine, [request])[0]) for request in asked]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(schemas, min_size=1, max_size=6), st.integers(0, 2**31 - 1))
def test_what_is_written_is_valid_and_the_neighbours_text_is_theirs(
    engine: Engine, compiler: GrammarCompiler, free: list[tuple[GenerateRequest, Result]], asked: list[JsonSchema], seed: int
) -> None:
    tokenizer = engine.model.tokenizer
    requests = []
    for i, schema in enumerate(asked):
        form = compiler.compile(Grammar("json_schema", json.dumps(schema), "schema"))
        sampling = SamplingParams(temperature=float(i % 3), seed=seed + i)
        requests.append(GenerateRequest(PROMPTS[i % 4], N, sampling, constraint=Constraint(form)))
    results = generate(engine, [*requests, *(request for request, _ in free)])
    assert results[len(requests) :] == [result for _, result in free]
    for schema, (tokens, reason) in zip(asked, results, strict=False):
        if reason is FinishReason.STOP:
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)
        else:
            assert len(tokens) == N
    assert sum(reason is FinishReason.STOP for _, reason in results) >= len(requests) - 1, "hardly any text is that long"
    assert generate(engine, requests[:1]) == results[:1], "a constrained text is the same in company and alone"
    assert engine.stats().compile_misses == 0


THREE_LETTERS = {"".join(letters) for letters in itertools.product("ab", repeat=3)}


@pytest.mark.parametrize(
    ("kind", "text", "allowed"),
    [("choice", '["yes", "no", "maybe\\n"]', {"yes", "no", "maybe\n"}), ("regex", "[ab]{3}", THREE_LETTERS)],
)
def test_biases_and_penalties_choose_among_what_is_allowed(
    engine: Engine, compiler: GrammarCompiler, kind: Any, text: str, allowed: set[str]
) -> None:
    tokenizer = engine.model.tokenizer
    constraint = Constraint(compiler.compile(Grammar(kind, text, "text")))
    ends = frozenset({tokenizer.eos_id})
    kinds = [
        Adjustments(min_tokens=50),
        Adjustments(((tokenizer.eos_id, 100.0), (tokenizer.encode("z")[0], 100.0))),
        Adjustments((), 2.0, 1.0, 1.0, 3),
    ]
    requests = [GenerateRequest(PROMPTS[0], 60, GREEDY, ends, adjustments, constraint) for adjustments in kinds]
    for tokens, reason in generate(engine, requests):
        assert (tokenizer.decode(tokens) in allowed, reason) == (True, FinishReason.STOP)


def test_the_grammar_begins_behind_the_marker_that_the_model_draws(engine: Engine, compiler: GrammarCompiler) -> None:
    """The end of the text is the likeliest token of all here; before the marker it is not drawn, and behind it the grammar decides."""
    tokenizer = engine.model.tokenizer
    form = compiler.compile(Grammar("regex", "[0-9]{4}", "regex"))
    plain = GenerateRequest(PROMPTS[1], 30, GREEDY)
    (thoughts, _), *_ = generate(engine, [plain])
    marker = next(token for i, token in enumerate(thoughts) if i >= 4 and token not in thoughts[:i])
    n_thoughts = thoughts.index(marker) + 1
    asked = replace(plain, constraint=Constraint(form, marker), max_tokens=60)
    for requests in ([asked], [asked, plain, asked]):
        tokens, reason = generate(engine, requests)[0]
        assert tokens[:n_thoughts] == thoughts[:n_thoughts]
        assert reason is FinishReason.STOP
        answer = tokenizer.decode(tokens[n_thoughts:])
        assert len(answer) == 4 and answer.isdigit() and answer.isascii()
    biased = replace(asked, adjustments=Adjustments(((tokenizer.eos_id, 100.0),)), stop_token_ids=frozenset({tokenizer.eos_id}))
    tokens, reason = generate(engine, [biased])[0]
    assert tokens[:n_thoughts] == thoughts[:n_thoughts] and reason is FinishReason.STOP
