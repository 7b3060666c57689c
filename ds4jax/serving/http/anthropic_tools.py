"""Tools as `/v1/messages` describes them. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http.strict_json import raw_default
from ds4jax.serving.http.tool_use import ToolUse, function_tool, settle
from ds4jax.text.dsml import Tool

ID_PREFIX = "toolu_"


class ToolEntry(msgspec.Struct):
    """One entry of `tools`. Its schema stays as its bytes."""

    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: msgspec.Raw = raw_default(b"null")
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """`tool_choice` of a request."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def tool_use(entries: Sequence[ToolEntry], choice: ToolChoice | None) -> ToolUse | None:
    """Read `tools` and `tool_choice`; None if the reply may call nothing. Raises RequestError naming the entry at fault."""
    tools = [_tool(f"tools[{i}]", entry) for i, entry in enumerate(entries)]
    parallel = not (choice and choice.disable_parallel_tool_use)
    match choice:
        case None | ToolChoice(type="auto"):
            return settle(tools, parallel=parallel, id_prefix=ID_PREFIX)
        case ToolChoice(type="none"):
            return settle(tools, "none")
        case ToolChoice(type="any"):
            return settle(tools, "required", parallel=parallel, id_prefix=ID_PREFIX)
        case ToolChoice(type="tool", name=str(name)):
            return settle(tools, name=name, parallel=parallel, id_prefix=ID_PREFIX)
        case _:
            forms = '{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": ...} or {"type": "none"}'
            raise RequestError(f"tool_choice: expected {forms}", "tool_choice")


def _tool(place: str, entry: ToolEntry) -> Tool:
    if entry.type not in (None, "custom"):
        raise RequestError(
            f"{place}.type: got {entry.type!r}; this server runs no tools of its own and knows those of type 'custom' alone, "
            "which your client runs: leave the tool out, or describe it by a name and an input_schema",
            f"{place}.type",
        )
    if not entry.name:
        raise RequestError(f"{place}.name: this field is required; give the tool a name", f"{place}.name")
    schema = bytes(entry.input_schema)
    if not schema.startswith(b"{"):
        raise RequestError(f"{place}.input_schema: expected a JSON schema, which is an object", f"{place}.input_schema")
    return function_tool(entry.name, entry.description, schema, is_strict=entry.strict is True)
