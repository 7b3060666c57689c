"""The input of `/v1/responses`: items of many types, read as the messages of a conversation. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http.responses_sealed import unseal
from ds4jax.serving.http.responses_tools import Form, ToolEntry, describe, forms_of
from ds4jax.serving.http.tool_use import NO_IMAGE
from ds4jax.text.chat import Message, ToolCall

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
ROLES = ("user", "system", "developer", "assistant")

CALLS: Mapping[str, str | None] = {
    "function_call": None,
    "custom_tool_call": None,
    "local_shell_call": "local_shell",
    "tool_search_call": "tool_search",
    "web_search_call": "web_search_call",
    "image_generation_call": "image_generation_call",
}
"""Items that call a tool, and the name of the tool where the item itself has none."""

RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output", "tool_search_output")


class Part(msgspec.Struct):
    """One part of an item's content."""

    type: str = "input_text"
    text: str | None = None


Content = str | list[str | Part] | None


class Item(msgspec.Struct):
    """One item of the input, of any type. Its status is not asked: agents go on where a reply was cut, or a stream broke."""

    type: str = "message"
    role: str = "user"
    content: Content = None
    summary: Content = None
    encrypted_content: str | None = None
    id: str | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: Any = None
    input: str | None = None
    action: Any = None
    output: Any = None
    tools: list[ToolEntry] | None = None


def read_input(given: str | Sequence[str | Item], earlier: Sequence[Message] = ()) -> list[Message]:
    """Read the input that continues some earlier messages. Raises RequestError naming the item at fault."""
    if isinstance(given, str):
        return [Message("user", given)]
    if not given:
        raise RequestError("input: the list is empty; send text, or at least one item", "input")
    reader = _Reader({call.id for message in earlier for call in message.tool_calls})
    for i, item in enumerate(given):
        reader.take(f"input[{i}]", Item(content=item) if isinstance(item, str) else item)
    return reader.finish()


def forms_of_results(given: str | Sequence[str | Item]) -> dict[str, Form]:
    """Find how calls are told of the tools that searches for tools have found. Raises RequestError naming one at fault."""
    forms: dict[str, Form] = {}
    for i, item in enumerate([] if isinstance(given, str) else given):
        if isinstance(item, Item):
            forms |= forms_of(describe(f"input[{i}].tools", item.tools or []))
    return forms


class _Reader:
    """Items to messages. What an assistant thinks, says and calls are items of their own here, and parts of one message there."""

    def __init__(self, called: set[str]) -> None:
        self._called = called
        self._messages: list[Message] = []
        # The assistant's message that is being put together; its parts come in this order.
        self._thoughts: list[str] = []
        self._text: str | None = None
        self._calls: list[ToolCall] = []

    def take(self, place: str, item: Item) -> None:
        """Read one item."""
        if item.type == "message":
            self._message(place, item)
        elif item.type == "reasoning":
            if self._text is not None or self._calls:
                self._flush()
            self._thoughts += [text for text in _thoughts(place, item) if text]
        elif item.type in CALLS:
            self._calls.append(_call(place, item))
            self._called.add(self._calls[-1].id)
        elif item.type in RESULTS:
            self._result(place, item)
        elif item.type not in ("compaction", "context_compaction"):  # shortened by a server that alone can read it
            raise RequestError(f"{place}.type: items of type {item.type!r} are not supported", f"{place}.type")

    def finish(self) -> list[Message]:
        """Return the messages."""
        self._flush()
        return self._messages

    def _message(self, place: str, item: Item) -> None:
        if item.role not in ROLES:
            raise RequestError(f"{place}.role: got {item.role!r}, expected one of {', '.join(ROLES)}", f"{place}.role")
        text = _text(f"{place}.content", item.content)
        if item.role != "assistant" or self._text is not None or self._calls:
            self._flush()
        if item.role == "assistant":
            self._text = text
        else:
            self._messages.append(Message(item.role, text))

    def _result(self, place: str, item: Item) -> None:
        if item.call_id not in self._called:
            at = f"{place}.call_id"
            raise RequestError(f"{at}: got {item.call_id!r}, which no call before it has; send the whole conversation", at)
        self._flush()
        if item.type == "tool_search_output" and item.output is None:
            text = _found_tools(f"{place}.tools", item.tools or [])
        else:
            text = item.output if isinstance(item.output, str) else _text_of_output(f"{place}.output", item.output)
        self._messages.append(Message("tool", text, tool_call_id=item.call_id))

    def _flush(self) -> None:
        """End the assistant's message, if there is any of it."""
        if self._thoughts or self._text is not None or self._calls:
            reasoning = "\n".join(self._thoughts) or None
            self._messages.append(Message("assistant", self._text or "", reasoning=reasoning, tool_calls=tuple(self._calls)))
        self._thoughts, self._text, self._calls = [], None, []


def _thoughts(place: str, item: Item) -> tuple[str, ...]:
    """Read what a client sends back of the model's thoughts; it may have them twice, sealed and as a summary."""
    shown = _text(f"{place}.summary", item.summary), _text(f"{place}.content", item.content)
    try:
        sealed = unseal(item.encrypted_content or "")
    except ValueError as error:
        at = f"{place}.encrypted_content"
        raise RequestError(f"{at}: not as this server wrote it ({error}); send it back unchanged, or leave the item out", at) from None
    return shown if sealed is None else (sealed,)


def _call(place: str, item: Item) -> ToolCall:
    name = (item.namespace or "") + (item.name or CALLS[item.type] or "")
    call_id = item.call_id or item.id
    if not name or not call_id:
        raise RequestError(f"{place}: an item of type {item.type!r} needs a name and a call_id", place)
    if item.type == "custom_tool_call":
        return ToolCall(call_id, name, _json({"input": item.input or ""}))
    arguments = item.arguments if item.arguments is not None else item.action
    return ToolCall(call_id, name, arguments if isinstance(arguments, str) else _json(arguments or {}))


def _found_tools(place: str, tools: Sequence[ToolEntry]) -> str:
    """Describe further tools where they were found. Put among the others they would change how the prompt begins: no cache would fit."""
    schemas = [tool.schema for tool, _ in describe(place, tools)]
    return "\n".join(["You can call these tools too:", *schemas]) if schemas else "No tools were found."


def _text_of_output(place: str, output: Any) -> str:
    """Read what a tool gave: parts that are text or images, or any other JSON as it is."""
    if not isinstance(output, list) or not all(map(_is_part, output)):
        return "" if output is None else _json(output)
    # Nobody chose that it is an image, so the model is told, and the conversation goes on.
    return _text(
        place, [Part(text=NO_IMAGE) if part.get("type") == "input_image" else Part(str(part.get("type")), part["text"]) for part in output]
    )


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and (value.get("type") == "input_image" or isinstance(value.get("text"), str))


def _text(place: str, content: Content) -> str:
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


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
