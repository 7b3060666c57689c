"""Calls that can be nothing but valid: a grammar, in llguidance's notation, of a block in which tools are called as their schemas say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds4jax.text.dsml.calls import Tool
from ds4jax.text.dsml.markup import escape_attribute, escape_string

Opening = Literal["block", "call", "parameters"]
"""Where a text begins: behind the mark of the tag that opens the block, behind `invoke`, or behind a whole tag that opens a call."""

_DEEPEST = 8  # alternatives inside alternatives, and names for them


@dataclass(frozen=True, slots=True)
class StrictCalls:
    """The rest of a block of calls, behind what `opening` says.

    A tool that is strict has the parameters of its schema, in their order, each of a type that the schema gives it; any other tool has any.
    Strings are enforced as far as their choices are listed: they are written as raw text, which has no schema.

    tools: where `opening` is "parameters", the one that is called comes first. parallel: whether the block may hold more than one call.
    """

    tools: Sequence[Tool]
    opening: Opening
    parallel: bool


def calls_grammar(calls: StrictCalls, mark_id: int, json_options: Mapping[str, Any]) -> str:
    """Write the grammar. mark_id: the token in the tags. json_options: how llguidance is to read schemas of values that are no strings."""
    tools = calls.tools
    more = '("<" mark "invoke" call)* ' if calls.parallel else ""
    rules = [
        f"start: {_STARTS[calls.opening]} {more}block_end",
        f"mark: <[{mark_id}]>",
        *_RULES,
        f"json: %json {json.dumps({'x-guidance': json_options})}",
        'call: " name=" (' + " | ".join(f"call_{i}" for i in range(len(tools))) + ")",
    ]
    for i, tool in enumerate(tools):
        name = _quoted(f'"{escape_attribute(tool.name)}"')
        rules += [f'call_{i}: {name} ">\\n" body_{i}', *_body(str(i), _parameters(tool), json_options)]
    return "\n".join(rules)


_STARTS: Mapping[Opening, str] = {"block": '"tool_calls>\\n<" mark "invoke" call', "call": "call", "parameters": "body_0"}
# An end tag is told from the same letters inside a value by its mark, which is no text.
_RULES = (
    'block_end: "</" mark "tool_calls>"',
    'invoke_end: "</" mark "invoke>\\n"',
    'parameter_end: "</" mark "parameter>\\n"',
    'text: (/[^<]+/ | "<" | "</")* parameter_end',
    'string: "true\\">" text',
    'any: "<" mark "parameter name=\\"" /[^"<>&\\n]+/ "\\" string=\\"" (string | "false\\">" json parameter_end)',
)


def _body(index: str, parameters: Mapping[str, Any] | None, json_options: Mapping[str, Any]) -> Iterator[str]:
    """Write the rules of what stands in a call of one tool."""
    if parameters is None:
        yield f"body_{index}: any* invoke_end"
        return
    required, members = parameters.get("required") or (), []
    for k, (name, schema) in enumerate(parameters["properties"].items()):
        values = " | ".join(_value(value, json_options) for value in _alternatives(schema, parameters))
        tag = _quoted(f'parameter name="{escape_attribute(name)}" string="')
        yield f'p_{index}_{k}: "<" mark {tag} ({values})'
        members.append(f"p_{index}_{k}" + "?" * (name not in required))
    yield f"body_{index}: {' '.join([*members, 'invoke_end'])}"


def _parameters(tool: Tool) -> dict[str, Any] | None:
    """The schema of a tool's parameters, if it is strict and lists them all."""
    parameters = json.loads(tool.schema).get("parameters") if tool.is_strict else None
    if not isinstance(parameters, dict) or parameters.get("additionalProperties") is not False:
        return None
    return parameters if isinstance(parameters.setdefault("properties", {}), dict) else None


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Any]:
    """Yield what a value may be: a string that it is, str for any string, or a schema of what is no string."""
    match schema:
        case _ if depth == _DEEPEST:
            yield schema
        case {"$ref": str(ref)} if ref.startswith("#/"):
            target: Any = root
            for key in ref[2:].split("/"):
                target = target.get(key) if isinstance(target, dict) else None
            yield from _alternatives(target, root, depth + 1) if target is not None else [schema]
        case {"anyOf": list(options)} | {"oneOf": list(options)}:
            for option in options:
                yield from _alternatives(option, root, depth + 1)
        case {"const": str(word)}:
            yield word
        case {"enum": list(words)}:
            yield from (word for word in words if isinstance(word, str))
            if others := [word for word in words if not isinstance(word, str)]:
                yield {"enum": others}
        case {"type": list(kinds)}:
            for kind in kinds:
                yield from _alternatives({**schema, "type": kind}, root, depth + 1)
        case {"type": "string"}:
            yield str
        case dict():
            refers = "$ref" in json.dumps(schema)
            yield {**schema, **{name: root[name] for name in ("$defs", "definitions") if refers and name in root}}
        case _:
            yield {}


def _value(value: Any, json_options: Mapping[str, Any]) -> str:
    """Describe a value, from behind `string="` to the end of its parameter."""
    if value is str:
        return "string"
    if isinstance(value, str):
        return _quoted(f'true">{escape_string(value)}') + " parameter_end"
    return f'"false\\">" %json {json.dumps({**value, "x-guidance": json_options})} parameter_end'


def _quoted(text: str) -> str:
    return json.dumps(text)
