"""What a response of `/v1/responses` repeats of its request. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from ds4jax.serving.http.strict_json import raw_default

_NULL = orjson.Fragment(b"null")
# What clients may count on finding, whether or not the request had it.
_OF_A_FUNCTION: Mapping[str, Any] = {"description": _NULL, "parameters": _NULL, "strict": False}
_OF_A_SCHEMA: Mapping[str, Any] = {"description": _NULL, "strict": False}


class _Text(msgspec.Struct):
    format: dict[str, msgspec.Raw] | None = None


class _Sent(msgspec.Struct):
    """Members that are repeated as they were sent: JSON may hold larger numbers, and nest deeper, than the writer of replies takes."""

    tools: list[dict[str, msgspec.Raw]] | None = None
    tool_choice: msgspec.Raw = raw_default(b"null")
    metadata: msgspec.Raw = raw_default(b"null")
    text: _Text | None = None


def read_echo(data: bytes) -> dict[str, Any]:
    """Read from a body that is known to be good what is repeated as it is."""
    sent = msgspec.json.decode(data, type=_Sent)
    form = sent.text.format if sent.text else None
    return {
        "metadata": _given(sent.metadata, {}),
        "text": {"format": _filled(form, "json_schema", _OF_A_SCHEMA) if form else {"type": "text"}},
        "tool_choice": _given(sent.tool_choice, "auto"),
        "tools": [_filled(tool, "function", _OF_A_FUNCTION) for tool in sent.tools or []],
    }


def _given(value: msgspec.Raw, default: Any) -> Any:
    return default if bytes(value) in (b"null", b"{}", b'""') else orjson.Fragment(bytes(value))


def _filled(members: Mapping[str, msgspec.Raw], kind: str, default: Mapping[str, Any]) -> dict[str, Any]:
    """Add to an object of one type the members that it lacks."""
    given = {name: orjson.Fragment(bytes(value)) for name, value in members.items()}
    is_of_kind = "type" in members and msgspec.json.decode(members["type"]) == kind
    return {**default, **given} if is_of_kind else given
