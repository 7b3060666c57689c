"""Tools as `/v1/responses` describes them, and how their calls are told. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http.strict_json import raw_default
from ds4jax.serving.http.tool_use import ToolUse, function_tool, settle
from ds4jax.text.dsml import Tool

HOSTED = ("web_search", "image_generation", "tool_search")
"""Types of tools, or how they start, that agents offer to any model and that the server would have to run."""

_CUSTOM_PARAMETERS = b'{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}'


class ToolFormat(msgspec.Struct):
    """What the input of a custom tool has to look like."""

    syntax: str = "text"
    definition: str | None = None


class ToolEntry(msgspec.Struct):
    """One entry of `tools`, of any type. Its parameters stay as their bytes; tools are those of a namespace."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: msgspec.Raw = raw_default(b"null")
    strict: bool | None = None
    format: ToolFormat | None = None
    execution: str | None = None
    tools: list[ToolEntry] | None = None


@dataclass(frozen=True)
class Form:
    """How the calls of a tool are told: as items of this type, under this name."""

    type: Literal["function_call", "custom_tool_call", "tool_search_call"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True)
class Tools:
    """The tools of a request. use: None if the reply may call nothing; forms: by the name under which the model knows a tool."""

    use: ToolUse | None = None
    forms: Mapping[str, Form] = field(default_factory=dict)


def read_tools(entries: Sequence[ToolEntry], choice: str | dict[str, Any] | None, *, parallel: bool) -> Tools:
    """Read `tools` and `tool_choice`. Raises RequestError naming the entry at fault."""
    known = list(describe("tools", entries))
    return Tools(_use([tool for tool, _ in known], choice, parallel), forms_of(known))


def describe(place: str, entries: Sequence[ToolEntry], namespace: str | None = None) -> Iterator[tuple[Tool, Form]]:
    """Describe tools to the model; those of a namespace get its name in front of theirs. Raises RequestError naming one at fault.

    Hosted tools are left out: agents offer them always, and a model that is not told of one does without.
    """
    for i, entry in enumerate(entries):
        at = f"{place}[{i}]"
        match entry.type:
            case "function":
                yield _function(at, entry, namespace), Form("function_call", entry.name, namespace)
            case "custom":
                yield _custom(at, entry, namespace), Form("custom_tool_call", entry.name, namespace)
            case "namespace" if namespace is None:
                yield from describe(f"{at}.tools", entry.tools or [], _named(at, entry))
            case "tool_search" if entry.execution == "client":
                yield function_tool("tool_search", entry.description, _parameters(at, entry)), Form("tool_search_call", "tool_search")
            case other if not other.startswith(HOSTED):
                raise RequestError(
                    f"{at}.type: got {other!r}; this server runs no tools of its own and knows those of type 'function', 'custom' and "
                    "'namespace', which your client runs: leave the tool out, or describe it as a function",
                    f"{at}.type",
                )


def forms_of(known: Iterable[tuple[Tool, Form]]) -> dict[str, Form]:
    """Find forms by the names that the model uses."""
    return {tool.name: form for tool, form in known}


def _use(tools: Sequence[Tool], choice: str | dict[str, Any] | None, parallel: bool) -> ToolUse | None:
    match choice:
        case None:
            return settle(tools, parallel=parallel)
        case "auto" | "none" | "required":
            return settle(tools, choice, parallel=parallel)
        case {"type": "function" | "custom", "name": str(name)}:
            return settle(tools, name=name, parallel=parallel)
        case _:
            forms = '"none", "auto", "required", {"type": "function", "name": ...} or {"type": "custom", "name": ...}'
            raise RequestError(f"tool_choice: expected {forms}", "tool_choice")


def _function(place: str, entry: ToolEntry, namespace: str | None) -> Tool:
    name = (namespace or "") + _named(place, entry)
    return function_tool(name, entry.description, _parameters(place, entry), is_strict=entry.strict is True)


def _custom(place: str, entry: ToolEntry, namespace: str | None) -> Tool:
    """Describe a tool that takes free text: to the model, a function of one string."""
    about = entry.description or ""
    if entry.format is not None and entry.format.definition is not None:
        # Nothing makes the model keep to the grammar, so it has to know it.
        about += f"\n\n`input` has to follow this grammar ({entry.format.syntax}):\n{entry.format.definition}"
    return function_tool((namespace or "") + _named(place, entry), about.strip(), _CUSTOM_PARAMETERS)


def _named(place: str, entry: ToolEntry) -> str:
    if not entry.name:
        raise RequestError(f"{place}.name: this field is required; give it a name", f"{place}.name")
    return entry.name


def _parameters(place: str, entry: ToolEntry) -> bytes | None:
    parameters = bytes(entry.parameters)
    if parameters != b"null" and not parameters.startswith(b"{"):
        raise RequestError(f"{place}.parameters: expected a JSON schema, which is an object", f"{place}.parameters")
    return None if parameters == b"null" else parameters
