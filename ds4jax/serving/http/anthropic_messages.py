"""`/v1/messages`: the body, and the conversation it holds. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.http import conversation, strict_json
from ds4jax.serving.http.call import Call, new_id
from ds4jax.serving.http.conversation import ConversationBody, Prompt, Served
from ds4jax.serving.http.params import checked_stops
from ds4jax.serving.http.thinking import Effort, resolve
from ds4jax.serving.http.unsupported import reject_unsupported
from ds4jax.text.chat import Message

BILLING_HEADER = "x-anthropic-billing-header"
"""How the first system block of some clients starts; it is about an account elsewhere, changes often, and says nothing to a model."""


class Block(msgspec.Struct):
    """One content block of a message, of any type."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None


class Turn(msgspec.Struct):
    """One message of a request."""

    role: str = "user"
    content: str | list[str | Block] | None = None


class OutputConfig(msgspec.Struct):
    """`output_config` of a request."""

    effort: str | None = None
    format: Any = None


class MessagesBody(ConversationBody, kw_only=True):
    """The body of a messages request."""

    messages: list[Turn]
    system: str | list[str | Block] | None = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None


def read(data: bytes, served: Served) -> Call:
    """Read a body into a call. Raises RequestError or ContextLengthError naming the field at fault."""
    body = _decode(data)
    prompt = _render(body, served)
    return Call(
        endpoint="messages",
        id=new_id("msg", "_"),
        model=body.model or served.config.model_id,
        requests=(conversation.request_of(prompt, body, served, limit=("max_tokens", body.max_tokens), param="messages"),),
        opens_reasoning=prompt.opens_reasoning,
        stop_strings=checked_stops("stop_sequences", body.stop_sequences or []),
        stream=bool(body.stream),
    )


def count_tokens(data: bytes, served: Served) -> tuple[str | None, int]:
    """Read a body, and return the model it names and the tokens of its prompt. Raises RequestError naming the field at fault."""
    body = _decode(data)
    return body.model, len(_render(body, served).ids)


def _decode(data: bytes) -> MessagesBody:
    body = strict_json.decode(data, MessagesBody)
    reject_unsupported(body)
    for name, value in (("mcp_servers", body.mcp_servers), ("container", body.container)):
        if value:
            raise RequestError(f"{name}: not supported; leave it out, and run tools on the client's side", name)
    if body.output_config is not None and body.output_config.format is not None:
        raise RequestError("output_config.format: not supported yet; leave it out", "output_config.format")
    return body


def _render(body: MessagesBody, served: Served) -> Prompt:
    effort = Effort("output_config.effort", body.output_config.effort if body.output_config else None)
    thinks = resolve(body, body.model, effort)
    messages = [*_system(body.system)]
    for i, turn in enumerate(body.messages):
        messages += _turn(f"messages[{i}]", turn)
    if not body.messages:
        raise RequestError("messages: the list is empty; send at least one message", "messages")
    return conversation.render(messages, served, thinks=thinks, param="messages")


def _system(system: str | list[str | Block] | None) -> Iterator[Message]:
    """Read the system prompt: its blocks are joined by line breaks."""
    blocks = [system] if isinstance(system, str) else list(_texts("system", system or []))
    if isinstance(system, list) and blocks and blocks[0].startswith(BILLING_HEADER):
        del blocks[0]
    text = ""
    for block in blocks:
        text += "\n" * bool(text and not text.endswith("\n")) + block
    if text:
        yield Message("system", text)


def _turn(place: str, turn: Turn) -> Iterator[Message]:
    """Read one message."""
    blocks: Iterable[str | Block] = [turn.content] if isinstance(turn.content, str) else turn.content or []
    match turn.role:
        case "user" | "system" | "developer":
            yield Message(turn.role, "".join(_texts(f"{place}.content", blocks)))
        case "assistant":
            yield _assistant(place, blocks)
        case _:
            raise RequestError(f"{place}.role: got {turn.role!r}, expected user, assistant or system", f"{place}.role")


def _assistant(place: str, blocks: Iterable[str | Block]) -> Message:
    """Read what the model said before. The signature of a thinking block is not checked: it is ours, and binds nothing."""
    texts, thoughts = [], []
    for i, block in enumerate(blocks):
        if isinstance(block, Block) and block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif isinstance(block, Block) and block.type == "redacted_thinking":
            pass  # another server's thoughts, which nobody but that server can read
        else:
            texts.append(_text(f"{place}.content[{i}]", block))
    return Message("assistant", "".join(texts), reasoning="".join(thoughts) or None)


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
