"""Grammars that intersect automata: compiled in a process of their own first, which ends where they would not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from ds4jax.errors import RequestError
from ds4jax.text import grammar_trial
from ds4jax.text.grammar import Grammar, GrammarCompiler, Kind
from tests.http.fakes import byte_tokenizer
from tests.text.test_grammar import accepts, compiled

COMPILER = GrammarCompiler(byte_tokenizer())
STRINGS = [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(60)]
DOUBLED = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {"type": "string", "pattern": "a+"}}

ENDLESS: list[tuple[Kind, str]] = [
    ("json_schema", json.dumps({"allOf": STRINGS})),
    ("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": DOUBLED})),
    ("json_schema", json.dumps({"allOf": [{"type": "integer", "multipleOf": m} for m in (9973, 9967)]}).replace("allOf", "\\u0061llOf")),
    ("grammar", "start: A\nA: " + " & ".join(f"/{s['pattern']}/" for s in STRINGS)),
    ("grammar", f"start: <think> %json {json.dumps({'allOf': STRINGS})}"),
]


@pytest.mark.parametrize(("kind", "text"), ENDLESS)
def test_what_would_never_end_is_refused(kind: Kind, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "LONGEST_S", 1)
    with pytest.raises(RequestError, match="too much time or memory|Unable to determine"):
        COMPILER.compile(Grammar(kind, text, "field"))


def test_a_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"allOf": [{"type": "string", "pattern": "^a.*"}, {"type": "string", "pattern": ".*b$"}]}
    form = compiled("json_schema", json.dumps(schema))
    assert accepts(form, b'"axb"') and not accepts(form, b'"axc"') and not accepts(form, b'"xb"')
    monkeypatch.setattr(subprocess, "run", None)
    assert accepts(compiled("json_schema", json.dumps(schema)), b'"ab"')


def test_a_trial_that_fails_for_another_reason_is_not_held_against_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = json.dumps({"allOf": [{"type": "string", "maxLength": 3}]})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", shutil.which("false"))
        with pytest.raises(RequestError, match="ended with status 1; send the request again"):
            compiled("json_schema", schema)
    assert accepts(compiled("json_schema", schema), b'"abc"')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "format": "date"}, "b": {"enum": [1, "x"]}}, "required": ["a"]},
        {"$defs": {"p": {"type": "object", "properties": {"x": {"type": "number"}}}}, "type": "array", "items": {"$ref": "#/$defs/p"}},
    ],
)
def test_common_schemas_need_no_process(schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    compiled("json_schema", json.dumps(schema))


def test_special_tokens_may_be_named_beside_what_is_tried() -> None:
    form = compiled("grammar", "start: <think> A\nA: /a.*/ & /.*b/")
    assert len(form.first_mask) >= byte_tokenizer().n_vocab // 8
