"""The conversation of `/v1/messages`: turns made of content blocks, read as messages. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http.strict_json import raw_default
from ds4jax.serving.http.tool_use import NO_IMAGE
from ds4jax.text.chat import Message, ToolCall

BILLING_HEADER = "x-anthropic-billing-header"
"""How the first system block of some clients starts; it is about an account elsewhere, changes often, and says nothing to a model."""


class Block(msgspec.Struct):
    """One content block, of any type."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = raw_default(b"{}")
    tool_use_id: str | None = None
    content: str | list[str | Block] | None = None
    is_error: bool | None = None


Content = str | list[str | Block] | None


class Turn(msgspec.Struct):
    """One message of a request."""

    role: str = "user"
    content: Content = None


def read_turns(system: Content, turns: Sequence[Turn]) -> list[Message]:
    """Read a conversation. Raises RequestError naming the block at fault."""
    if not turns:
        raise RequestError("messages: the list is empty; send at least one message", "messages")
    messages = list(_system(system))
    called: set[str] = set()
    for i, turn in enumerate(turns):
        place, blocks = f"messages[{i}]", _blocks(turn.content)
        match turn.role:
            case "user":
                messages += _user(f"{place}.content", blocks, called)
            case "assistant":
                messages.append(_assistant(f"{place}.content", blocks))
                called |= {call.id for call in messages[-1].tool_calls}
            case "system" | "developer":
                messages.append(Message("system", "".join(_texts(f"{place}.content", blocks))))
            case _:
                raise RequestError(f"{place}.role: got {turn.role!r}, expected user, assistant or system", f"{place}.role")
    return messages


def _system(system: Content) -> Iterator[Message]:
    """Read the system prompt: its blocks are joined by line breaks."""
    blocks = list(_texts("system", _blocks(system)))
    if isinstance(system, list) and blocks and blocks[0].startswith(BILLING_HEADER):
        del blocks[0]
    text = ""
    for block in blocks:
        text += "\n" * bool(text and not text.endswith("\n")) + block
    if text:
        yield Message("system", text)


def _user(place: str, blocks: Sequence[str | Block], called: set[str]) -> Iterator[Message]:
    """Read what the user said and what the tools gave, in this order of blocks; neighbouring texts become one message."""
    texts: list[str] = []
    for i, block in enumerate(blocks):
        at = f"{place}[{i}]"
        if isinstance(block, str) or block.type != "tool_result":
            texts.append(_text(at, block))
            continue
        if texts:
            yield Message("user", "".join(texts))
            texts = []
        yield _result(at, block, called)
    if texts or not blocks:
        yield Message("user", "".join(texts))


def _result(place: str, block: Block, called: set[str]) -> Message:
    if block.tool_use_id not in called:
        at = f"{place}.tool_use_id"
        raise RequestError(f"{at}: got {block.tool_use_id!r}, which no tool_use block before it has; send the whole conversation", at)
    text = "".join(_texts_of_result(f"{place}.content", _blocks(block.content)))
    if block.is_error and "error" not in text.lower():  # the model has only the text to know it from, and most tools say it there
        text = f"Error: {text}" if text else "Error"
    return Message("tool", text, tool_call_id=block.tool_use_id)


def _texts_of_result(place: str, blocks: Iterable[str | Block]) -> Iterator[str]:
    """Read what a tool gave. Nobody chose that it is an image, so the model is told, and the conversation goes on."""
    for i, block in enumerate(blocks):
        yield NO_IMAGE if isinstance(block, Block) and block.type == "image" else _text(f"{place}[{i}]", block)


def _assistant(place: str, blocks: Sequence[str | Block]) -> Message:
    """Read what the model said before. The signature of a thinking block is not checked: it is ours, and binds nothing."""
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        kind = "text" if isinstance(block, str) else block.type
        if isinstance(block, Block) and kind == "thinking":
            thoughts.append(block.thinking or "")
        elif isinstance(block, Block) and kind == "tool_use":
            calls.append(_call(f"{place}[{i}]", block))
        elif kind != "redacted_thinking":  # another server's thoughts, which nobody but that server can read
            texts.append(_text(f"{place}[{i}]", block))
    return Message("assistant", "".join(texts), reasoning="".join(thoughts) or None, tool_calls=tuple(calls))


def _call(place: str, block: Block) -> ToolCall:
    if not block.id or not block.name:
        raise RequestError(f"{place}: a tool_use block needs an id and a name", place)
    arguments = bytes(block.input).decode().strip()
    if arguments != "null" and not arguments.startswith("{"):
        raise RequestError(f"{place}.input: expected an object", f"{place}.input")
    return ToolCall(block.id, block.name, "{}" if arguments == "null" else arguments)


def _blocks(content: Content) -> list[str | Block]:
    return [content] if isinstance(content, str) else content or []


def _texts(place: str, blocks: Iterable[str | Block]) -> Iterator[str]:
    for i, block in enumerate(blocks):
        yield _text(f"{place}[{i}]", block)


def _text(place: str, block: str | Block) -> str:
    """Read a block that must be text. Raises RequestError naming its place if it is not."""
    if isinstance(block, str):
        return block
    if block.type == "text" and block.text is not None:
        return block.text
    raise RequestError(f"{place}: a block of type {block.type!r} is not supported here; this model reads text", place)
