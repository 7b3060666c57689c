"""What an answer has to look like, in every spelling that clients use, read into one grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import Constraint
from ds4jax.serving.http.tool_use import ToolUse
from ds4jax.text.grammar import Grammar, GrammarCompiler

MOST_CHOICES = 10_000
_ANY_OBJECT = '{"type":"object"}'
# Members of `structured_outputs` that change what its grammar means. Those that only choose who enforces it are ignored.
_REFUSED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")

Format = Mapping[str, Any]


class StructuredFields(Protocol):
    """The members of a body that ask for a form of the answer."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    json_schema: dict[str, Any] | None
    grammar: str | None


def read_grammar(body: StructuredFields, *formats: tuple[str, Format | None]) -> Grammar | None:
    """Read what a body asks of its answer; None if nothing.

    formats: further fields that are written like `response_format`, with their names. Raises RequestError naming a field that is no
    such thing, or one that comes on top of another.
    """
    grammars = [
        *_of_formats([("response_format", body.response_format), *formats]),
        *_of_members(body.structured_outputs or {}, "structured_outputs."),
        *_of_members({name: getattr(body, f"guided_{name}") for name in _MEMBERS if name != "json_object"}, "guided_"),
        *_of_members({"json": body.json_schema or None}, "json_schema", named=False),
        *_of_members({"grammar": body.grammar or None}, "grammar", named=False),
    ]
    if len(grammars) > 1:
        first, second = grammars[0].param, grammars[1].param
        raise RequestError(f"{second}: the answer has to follow {first} already; leave one of them out", second)
    return grammars[0] if grammars else None


# ---------------------------------------------------------------- response_format and its kin
def _of_formats(formats: Sequence[tuple[str, Format | None]]) -> Iterator[Grammar]:
    for name, asked in formats:
        match asked:
            case None | {"type": "text"}:
                pass
            case {"type": "json_schema"}:
                yield _schema_of(asked, name)
            case {"type": "json_object", "schema": dict(schema)}:  # as llama-server takes it
                yield Grammar("json_schema", _written(schema), f"{name}.schema", is_lenient=True)
            case {"type": "json_object"}:
                yield Grammar("json_schema", _ANY_OBJECT, name)
            case _:
                raise RequestError(f'{name}.type: expected "text", "json_object" or "json_schema"', f"{name}.type")


def _schema_of(asked: Format, name: str) -> Grammar:
    """Read a schema, which some APIs put into an object of its own."""
    inner = asked.get("json_schema")
    place = name if inner is None else f"{name}.json_schema"
    holder = asked if inner is None else inner
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(f"{place}.schema: expected a JSON schema, which is an object", f"{place}.schema")
    return Grammar("json_schema", _written(schema), f"{place}.schema", is_lenient=holder.get("strict") is not True)


# ---------------------------------------------------------------- structured_outputs and its kin
def _of_members(asked: Mapping[str, Any], prefix: str, *, named: bool = True) -> Iterator[Grammar]:
    """Read members that each are a grammar. named: whether the name of a member is part of its place in the body."""
    for name in _REFUSED:
        if asked.get(name):
            raise RequestError(f"{prefix}{name}: not supported; leave it out", f"{prefix}{name}")
    for name, read in _MEMBERS.items():
        value = asked.get(name)
        if value is not None and value is not False:
            yield read(value, f"{prefix}{name}" if named else prefix)


def _json(value: Any, param: str) -> Grammar:
    if not isinstance(value, dict | str):
        raise RequestError(f"{param}: expected a JSON schema, as an object or in a string", param)
    return Grammar("json_schema", value if isinstance(value, str) else _written(value), param, is_lenient=True)


def _regex(value: Any, param: str) -> Grammar:
    return Grammar("regex", _text(value, param), param)


def _grammar(value: Any, param: str) -> Grammar:
    return Grammar("grammar", _text(value, param), param)


def _choice(value: Any, param: str) -> Grammar:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_CHOICES or not all(isinstance(choice, str) for choice in value):
        raise RequestError(f"{param}: expected a list of 1 to {MOST_CHOICES} strings", param)
    return Grammar("choice", json.dumps(value), param)


def _json_object(value: Any, param: str) -> Grammar:
    if value is not True:
        raise RequestError(f"{param}: expected true or false", param)
    return Grammar("json_schema", _ANY_OBJECT, param)


_MEMBERS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param}: expected a string that is not empty", param)
    return value


def _written(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, separators=(",", ":"))


# ---------------------------------------------------------------- for the engine
def constrain(
    grammar: Grammar | None, compiler: GrammarCompiler, *, after: int | None = None, tool_use: ToolUse | None = None
) -> Constraint | None:
    """Compile what a reply has to look like, None for anything.

    grammar: of the answer. after: the token that ends the reasoning before it, if there is any. tool_use: calls that may come instead; if
    they have to come, there is no answer. Raises RequestError.
    """
    calls = tool_use.strict_calls if tool_use is not None and compiler.mark_id is not None else None
    if calls is not None and calls.opening != "block":
        return Constraint(compiler.compile_calls(calls, "tools"))
    if grammar is not None:
        return Constraint(compiler.compile(grammar, or_calls=tool_use is not None, calls=calls), after)
    if calls is not None:
        return Constraint(compiler.compile_calls(calls, "tools"), compiler.mark_id, may_end_before=True)
    return None
