"""The input of `/v1/responses`: items of many types, read as the messages of a conversation. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ds4jax.errors import RequestError
from ds4jax.text.chat import Message

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
ROLES = ("user", "system", "developer", "assistant")


class Part(msgspec.Struct):
    """One part of an item's content."""

    type: str = "input_text"
    text: str | None = None


Content = str | list[str | Part] | None


class Item(msgspec.Struct):
    """One item of the input, of any type."""

    type: str = "message"
    role: str = "user"
    status: str | None = None
    content: Content = None
    summary: Content = None


def read_input(given: str | list[str | Item]) -> list[Message]:
    """Read the input. Raises RequestError naming the item at fault."""
    if isinstance(given, str):
        return [Message("user", given)]
    if not given:
        raise RequestError("input: the list is empty; send text, or at least one item", "input")
    reader = _Reader()
    for i, item in enumerate(given):
        reader.take(f"input[{i}]", Item(content=item) if isinstance(item, str) else item)
    return reader.finish()


class _Reader:
    """Items to messages. What an assistant thought and said are items of their own here, and parts of one message there."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._thoughts: list[str] = []  # of the assistant's message that comes next

    def take(self, place: str, item: Item) -> None:
        """Read one item."""
        if item.status not in (None, "completed"):
            raise RequestError(f"{place}.status: got {item.status!r}; send only items that are completed", f"{place}.status")
        match item.type:
            case "message":
                self._message(place, item)
            case "reasoning":
                texts = (_text(f"{place}.summary", item.summary), _text(f"{place}.content", item.content))
                self._thoughts += [text for text in texts if text]
            case "compaction" | "context_compaction":
                pass  # shortened by a server that alone can read it
            case _:
                raise RequestError(f"{place}.type: items of type {item.type!r} are not supported", f"{place}.type")

    def finish(self) -> list[Message]:
        """Return the messages."""
        self._flush()
        return self._messages

    def _message(self, place: str, item: Item) -> None:
        if item.role not in ROLES:
            raise RequestError(f"{place}.role: got {item.role!r}, expected one of {', '.join(ROLES)}", f"{place}.role")
        text = _text(f"{place}.content", item.content)
        if item.role == "assistant":
            self._messages.append(Message("assistant", text, reasoning=self._take_thoughts()))
        else:
            self._flush()
            self._messages.append(Message(item.role, text))

    def _flush(self) -> None:
        """End what an assistant thought without saying anything."""
        if self._thoughts:
            self._messages.append(Message("assistant", "", reasoning=self._take_thoughts()))

    def _take_thoughts(self) -> str | None:
        thoughts, self._thoughts = self._thoughts, []
        return "\n".join(thoughts) or None


def _text(place: str, content: str | Sequence[str | Part] | None) -> str:
    """Join the parts of a content. Raises RequestError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, Part) and part.type not in TEXT_PARTS:
            at = f"{place}[{i}]"
            raise RequestError(f"{at}: a part of type {part.type!r} is not supported; this model reads text", at)
        texts.append(part if isinstance(part, str) else part.text or "")
    return "".join(texts)
