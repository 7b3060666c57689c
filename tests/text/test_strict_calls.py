"""Calls that follow a grammar, written by a walk at random through what it allows: all of them can be read, and are valid."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.errors import RequestError
from ds4jax.text.dsml import CallCollector, DsmlParser, StrictCalls, Tool, ToolCall, call_opening
from ds4jax.text.dsml.strict import Opening
from ds4jax.text.grammar import CompiledGrammar, Grammar, GrammarCompiler
from ds4jax.text.segments import to_ids, to_text
from ds4jax.text.special import DSML
from tests.http.fakes import DSML_ID, EOS_ID, byte_tokenizer
from tests.text.test_grammar import tokens_in

pytestmark = pytest.mark.smoke
TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER)


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = (), *, is_strict: bool = True, **more: Any) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False, **more}
    return Tool(name, json.dumps({"name": name, "parameters": parameters}), is_strict)


WEATHER = tool(
    "weather",
    {
        "city": {"type": "string"},
        "unit": {"enum": ["C", 'F "<&>"', 7, None]},
        "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/where"},
        "as": {"type": ["boolean", "string"]},
    },
    ["city", "unit", "days"],
    **{"$defs": {"where": {"enum": ["in", "out"]}}},
)
NOTHING = tool('no "thing"', {})
NODE = {"type": "object", "properties": {"n": {"type": "null"}}, "additionalProperties": False}
NESTED = tool("nested", {"o": {"$ref": "#/$defs/node"}}, ["o"], **{"$defs": {"node": NODE}})
LOOSE = tool("loose", {"a": {"type": "integer"}}, ["a"], is_strict=False)
TOOLS = [WEATHER, NOTHING, NESTED, LOOSE]


def walk(form: CompiledGrammar, rng: random.Random, most: int = 20_000) -> list[int]:
    """Write a text at random, with an inclination to come to an end."""
    matcher, mask, tokens = form.begin(), form.first_mask, list[int]()
    while len(tokens) < most:
        allowed = tokens_in(mask, TOKENIZER.n_vocab)
        assert allowed
        ends = allowed & ({ord("/")} if tokens[-1:] == [ord("<")] else {DSML_ID, EOS_ID, ord("<"), ord("}"), ord("]"), ord('"')})
        plain = [i for i in allowed if 32 <= i < 127] or sorted(allowed)
        token = rng.choice(sorted(ends) if ends and rng.random() < 0.6 else plain)
        if token == EOS_ID:
            return tokens
        tokens.append(token)
        following = matcher.advance(token)
        if following is None:
            return tokens
        mask = following
    raise AssertionError("the text comes to no end")


def read(text: str) -> list[ToolCall]:
    parser, collector = DsmlParser(lambda: "id"), CallCollector()
    events = [*parser.feed(text), *parser.finish()]
    assert parser.error is None and not parser.was_repaired and not [event for event in events if isinstance(event, str)]
    collector.take(events)  # type: ignore[arg-type]
    return collector.calls


def check(calls: Sequence[ToolCall]) -> None:
    schemas = {entry.name: json.loads(entry.schema)["parameters"] for entry in TOOLS if entry.is_strict}
    for call in calls:
        arguments = json.loads(call.arguments)
        if call.name in schemas:
            jsonschema.validate(arguments, schemas[call.name])
        else:
            assert call.name == LOOSE.name and isinstance(arguments, dict)


@settings(max_examples=60)
@given(st.sampled_from(get_args(Opening)), st.booleans(), st.permutations(TOOLS), st.integers(0, 2**32 - 1))
def test_every_text_is_a_block_of_valid_calls(opening: Opening, parallel: bool, tools: list[Tool], seed: int) -> None:
    form = COMPILER.compile_calls(StrictCalls(tools, opening, parallel), "tools")
    begun = {"block": f"\n\n<{DSML}", "call": to_text(call_opening(None)), "parameters": to_text(call_opening(tools[0].name))}[opening]
    calls = read(begun + TOKENIZER.decode(walk(form, random.Random(seed))))
    check(calls)
    assert parallel or len(calls) == 1
    assert opening != "parameters" or calls[0].name == tools[0].name


def test_calls_as_the_model_was_told_to_write_them_are_allowed() -> None:
    text = (
        f'tool_calls>\n<{DSML}invoke name="weather">\n'
        f'<{DSML}parameter name="city" string="true">a <b>"&lt;"</b>\n</x {{</{DSML}parameter>\n'
        f'<{DSML}parameter name="unit" string="true">F "<&>"</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
        f'<{DSML}parameter name="as" string="false">true</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="loose">\n<{DSML}parameter name="any" string="false">[1, {{"b": null}}]</{DSML}parameter>\n</{DSML}invoke>\n'
        f'<{DSML}invoke name="no &quot;thing&quot;">\n</{DSML}invoke>\n</{DSML}tool_calls>'
    )
    matcher = COMPILER.compile_calls(StrictCalls(TOOLS, "block", True), "tools").begin()
    tokens = TOKENIZER.encode_rendered(text)
    assert [matcher.advance(token) is None for token in tokens] == [False] * (len(tokens) - 1) + [True]
    assert json.loads(read(f"<{DSML}{text}")[0].arguments)["unit"] == 'F "<&>"'


def test_beside_an_answer_the_calls_are_as_strict() -> None:
    answer = Grammar("regex", "yes|no", "field")
    strict = COMPILER.compile(answer, or_calls=True, calls=StrictCalls(TOOLS, "block", True))
    assert tokens_in(strict.first_mask, TOKENIZER.n_vocab) == {ord("y"), ord("n"), ord("\n")}
    matcher = strict.begin()
    for token in TOKENIZER.encode_rendered(f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="'):
        mask = matcher.advance(token)
    assert mask is not None and tokens_in(mask, TOKENIZER.n_vocab) == {ord(entry.name[0]) for entry in TOOLS}


@pytest.mark.parametrize("parameters", [None, 5, {"type": "object"}, {"properties": [], "additionalProperties": False}, {"$ref": "#/x"}])
def test_schemas_that_list_no_parameters_leave_them_open(parameters: Any) -> None:
    odd = Tool("odd", json.dumps({"name": "odd", "parameters": parameters}), True)
    form = COMPILER.compile_calls(StrictCalls([odd], "parameters", False), "tools")
    matcher = form.begin()
    text = f'<{DSML}parameter name="x" string="true">y</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>'
    ids = to_ids(call_opening(None), TOKENIZER)
    assert DSML_ID in ids
    assert [token for token in TOKENIZER.encode_rendered(text) if matcher.advance(token) is None] == [ord(">")]


def test_more_than_can_be_followed_is_refused_by_the_name_of_the_field() -> None:
    huge = tool("huge", {f"p{i}": {"enum": [f"value {i} {j}" for j in range(100)]} for i in range(200)})
    with pytest.raises(RequestError, match="^tools: this set of tools cannot be enforced") as refused:
        COMPILER.compile_calls(StrictCalls([huge], "block", True), "tools")
    assert refused.value.param == "tools"
