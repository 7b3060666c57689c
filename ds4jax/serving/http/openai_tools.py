"""Tools and calls as `/v1/chat/completions` writes them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http.strict_json import raw_default
from ds4jax.serving.http.tool_use import ToolUse, settle
from ds4jax.text.dsml import ArgumentsDelta, CallEvent, CallStart, Tool, ToolCall


class Function(msgspec.Struct):
    """What is looked at in the description of a function; the model reads all of it."""

    name: str
    strict: bool | None = None


class ToolEntry(msgspec.Struct):
    """One entry of `tools`. The function stays as its bytes, so that a prompt changes only when a client's text does."""

    type: str = "function"
    function: msgspec.Raw = raw_default(b"{}")


class HistoryFunction(msgspec.Struct):
    """The function of a call made earlier; arguments is JSON in a string, or as some clients send it, the JSON itself."""

    name: str = ""
    arguments: str | dict[str, Any] | None = None


class HistoryCall(msgspec.Struct):
    """One call of an assistant's message."""

    id: str | None = None
    function: HistoryFunction | None = None


def tool_use(entries: Sequence[ToolEntry], choice: str | dict[str, Any] | None, *, parallel: bool) -> ToolUse | None:
    """Read `tools` and `tool_choice`; None if the reply may call nothing. Raises RequestError naming the entry at fault."""
    tools = [_tool(f"tools[{i}]", entry) for i, entry in enumerate(entries)]
    match choice:
        case None:
            return settle(tools, parallel=parallel)
        case "auto" | "none" | "required":
            return settle(tools, choice, parallel=parallel)
        case {"type": "function", "function": {"name": str(name)}}:
            return settle(tools, name=name, parallel=parallel)
        case _:
            forms = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
            raise RequestError(f"tool_choice: expected {forms}", "tool_choice")


def read_calls(place: str, calls: Sequence[HistoryCall]) -> tuple[ToolCall, ...]:
    """Read the calls of an assistant's message. Raises RequestError naming one without a function's name."""
    return tuple(_call(f"{place}[{i}]", call) for i, call in enumerate(calls))


def call_objects(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Write whole calls."""
    return [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]


def call_chunk(event: CallEvent) -> dict[str, Any] | None:
    """Write what has happened to a call; its end is not told."""
    match event:
        case CallStart():
            return {"index": event.index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        case ArgumentsDelta():
            return {"index": event.index, "function": {"arguments": event.text}}
        case _:
            return None


def _tool(place: str, entry: ToolEntry) -> Tool:
    if entry.type != "function":
        raise RequestError(f"{place}.type: got {entry.type!r}; this server knows tools of type 'function' alone", f"{place}.type")
    at = f"{place}.function"
    try:
        function = msgspec.json.decode(entry.function, type=Function)
    except msgspec.ValidationError:
        raise RequestError(f"{at}: expected an object with a `name`", at) from None
    if not function.name:
        raise RequestError(f"{at}.name: the name is empty; give the function one", f"{at}.name")
    return Tool(function.name, bytes(entry.function).decode().strip(), function.strict is True)


def _call(place: str, call: HistoryCall) -> ToolCall:
    if call.function is None or not call.function.name:
        raise RequestError(f"{place}.function.name: this field is required", f"{place}.function.name")
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return ToolCall(call.id or "", call.function.name, text)
