"""Items of `/v1/responses`: each opens, grows and closes in events of its own. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from ds4jax.serving.http.call import new_id
from ds4jax.serving.http.logprobs import Scored, token_entries
from ds4jax.serving.http.responses_sealed import seal

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
        self._logprobs: list[dict[str, Any]] = []
        self._n_told = 0  # of the log probabilities
        self._item_place = {"output_index": output_index}
        self._place = {"item_id": self._id, "output_index": output_index, "content_index": 0}

    def opening(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {**self._item_place, "item": {**self.render("in_progress"), "content": []}}
        yield "response.content_part.added", {**self._place, "part": self._part}

    def score(self, tokens: Sequence[Scored]) -> None:
        """Take log probabilities, which come with the next delta, and with the whole text."""
        self._logprobs += token_entries(tokens)

    def add(self, text: str) -> Iterator[ItemEvent]:
        self._parts.append(text)
        yield "response.output_text.delta", {**self._place, "delta": text, "logprobs": self._logprobs[self._n_told :]}
        self._n_told = len(self._logprobs)

    def closing(self, status: ItemStatus) -> Iterator[ItemEvent]:
        yield "response.output_text.done", {**self._place, "text": self.text, "logprobs": self._logprobs}
        yield "response.content_part.done", {**self._place, "part": self._part}
        yield "response.output_item.done", {**self._item_place, "item": self.render(status)}

    def render(self, status: ItemStatus) -> dict[str, Any]:
        return {"id": self._id, "type": self.kind, "status": status, "role": "assistant", "content": [self._part]}

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._parts)


class ReasoningItem:
    """The thoughts.

    is_shown: as one summary, all of them, for there is nothing here that could shorten them; is_sealed: as what the client can send
    back, once they have ended.
    """

    kind = "reasoning"

    def __init__(self, output_index: int, *, is_shown: bool, is_sealed: bool) -> None:
        self._is_shown, self._is_sealed = is_shown, is_sealed
        self._id = new_id("rs", "_")
        self._parts: list[str] = []
        self._item_place = {"output_index": output_index}
        self._place = {"item_id": self._id, "output_index": output_index, "summary_index": 0}

    def opening(self) -> Iterator[ItemEvent]:
        yield "response.output_item.added", {**self._item_place, "item": {**self.render("in_progress"), "summary": []}}
        if self._is_shown:
            yield "response.reasoning_summary_part.added", {**self._place, "part": _summary_text("")}

    def add(self, text: str) -> Iterator[ItemEvent]:
        self._parts.append(text)
        if self._is_shown:
            yield "response.reasoning_summary_text.delta", {**self._place, "delta": text}

    def closing(self, status: ItemStatus) -> Iterator[ItemEvent]:
        if self._is_shown:
            yield "response.reasoning_summary_text.done", {**self._place, "text": self._text}
            yield "response.reasoning_summary_part.done", {**self._place, "part": _summary_text(self._text)}
        yield "response.output_item.done", {**self._item_place, "item": self.render(status)}

    def render(self, status: ItemStatus) -> dict[str, Any]:
        sealed = {"encrypted_content": None if status == "in_progress" else seal(self._text)} if self._is_sealed else {}
        summary = [_summary_text(self._text)] if self._is_shown else []
        return {"id": self._id, "type": self.kind, "status": status, "summary": summary, **sealed}

    @property
    def _text(self) -> str:
        return "".join(self._parts)


def _summary_text(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}
