"""Items of `/v1/responses`: each opens, grows and closes in events of its own. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

from ds4jax.serving.http.call import new_id

ItemEvent = tuple[str, dict[str, Any]]
"""Type and members of an event; what all events share is added by whoever numbers them."""

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputItem(Protocol):
    """One item of a response's output."""

    kind: str

    def opening(self) -> Iterator[ItemEvent]:
        """Begin the item."""
        ...

    def add(self, text: str) -> Iterator[ItemEvent]:
        """Append to its text."""
        ...

    def closing(self, status: ItemStatus) -> Iterator[ItemEvent]:
        """End the item."""
        ...

    def render(self, status: ItemStatus) -> dict[str, Any]:
        """Write the item as it stands."""
        ...


class MessageItem:
    """The answer: one message with one part of text."""

    kind = "message"

    def __init__(self, output_index: int) -> None:
        self._id = new_id("msg", "_")
        self._parts: list[str] = []
        self._item_place = {"output_index": output_index}
        self._place = {"item_id": self._id, "output_index": output_index, "content_index": 0}

    def opening(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {**self._item_place, "item": {**self.render("in_progress"), "content": []}}
        yield "response.content_part.added", {**self._place, "part": _output_text("")}

    def add(self, text: str) -> Iterator[ItemEvent]:
        self._parts.append(text)
        yield "response.output_text.delta", {**self._place, "delta": text, "logprobs": []}

    def closing(self, status: ItemStatus) -> Iterator[ItemEvent]:
        yield "response.output_text.done", {**self._place, "text": self.text, "logprobs": []}
        yield "response.content_part.done", {**self._place, "part": _output_text(self.text)}
        yield "response.output_item.done", {**self._item_place, "item": self.render(status)}

    def render(self, status: ItemStatus) -> dict[str, Any]:
        return {"id": self._id, "type": self.kind, "status": status, "role": "assistant", "content": [_output_text(self.text)]}

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)


class ReasoningItem:
    """The thoughts, shown as one summary: all of them, for there is nothing here that could shorten them."""

    kind = "reasoning"

    def __init__(self, output_index: int) -> None:
        self._id = new_id("rs", "_")
        self._parts: list[str] = []
        self._item_place = {"output_index": output_index}
        self._place = {"item_id": self._id, "output_index": output_index, "summary_index": 0}

    def opening(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {**self._item_place, "item": {**self.render("in_progress"), "summary": []}}
        yield "response.reasoning_summary_part.added", {**self._place, "part": _summary_text("")}

    def add(self, text: str) -> Iterator[ItemEvent]:
        self._parts.append(text)
        yield "response.reasoning_summary_text.delta", {**self._place, "delta": text}

    def closing(self, status: ItemStatus) -> Iterator[ItemEvent]:
        text = "".join(self._parts)
        yield "response.reasoning_summary_text.done", {**self._place, "text": text}
        yield "response.reasoning_summary_part.done", {**self._place, "part": _summary_text(text)}
        yield "response.output_item.done", {**self._item_place, "item": self.render(status)}

    def render(self, status: ItemStatus) -> dict[str, Any]:
        return {"id": self._id, "type": self.kind, "status": status, "summary": [_summary_text("".join(self._parts))]}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _summary_text(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
