"""The content blocks of a reply of `/v1/messages`: each starts, grows and ends. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import orjson


class Block(Protocol):
    """One content block. is_whole: it may be shown in a reply that does not stream."""

    kind: str
    is_whole: bool

    def start(self) -> dict[str, Any]:
        """Write the block as it begins."""
        ...

    def add(self, text: str) -> dict[str, Any]:
        """Append to it, and write the delta that tells so."""
        ...

    def last_deltas(self) -> Iterator[dict[str, Any]]:
        """Write what is told right before its end."""
        ...

    def render(self) -> dict[str, Any]:
        """Write all of it."""
        ...


class TextBlock:
    """A piece of the answer."""

    kind = "text"
    is_whole = True

    def __init__(self) -> None:
        self._parts: list[str] = []

    def start(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def add(self, text: str) -> dict[str, Any]:
        self._parts.append(text)
        return {"type": "text_delta", "text": text}

    def last_deltas(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def render(self) -> dict[str, Any]:
        return {"type": "text", "text": "".join(self._parts)}


class ThinkingBlock:
    """Thoughts. Clients want a signature to send back; there is nothing to sign."""

    kind = "thinking"
    is_whole = True

    def __init__(self, signature: str) -> None:
        self._signature = signature
        self._parts: list[str] = []

    def start(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def add(self, text: str) -> dict[str, Any]:
        self._parts.append(text)
        return {"type": "thinking_delta", "thinking": text}

    def last_deltas(self) -> Iterator[dict[str, Any]]:
        yield {"type": "signature_delta", "signature": self._signature}

    def render(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "".join(self._parts), "signature": self._signature}


class ToolUseBlock:
    """A call of a tool. Until it is whole its arguments are no JSON text, so nobody can take it for a call."""

    kind = "tool_use"

    def __init__(self, id: str, name: str) -> None:
        self._head = {"type": "tool_use", "id": id, "name": name}
        self._parts: list[str] = []
        self.is_whole = False

    def start(self) -> dict[str, Any]:
        return {**self._head, "input": {}}

    def add(self, text: str) -> dict[str, Any]:
        self._parts.append(text)
        return {"type": "input_json_delta", "partial_json": text}

    def last_deltas(self) -> Iterator[dict[str, Any]]:
        yield from ()

    def render(self) -> dict[str, Any]:
        # The very text: read and written again, long numbers would be lost.
        return {**self._head, "input": orjson.Fragment("".join(self._parts))}
