"""Messages to a prompt.

A prompt is a list of segments, so that special tokens come from the renderer alone: whatever a message says, its text is
encoded as plain text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from ds4jax.errors import ConfigError, RequestError, TokenizerError
from ds4jax.text.special import ASSISTANT, BOS, END_THINK, EOS, THINK, USER
from ds4jax.text.tokenizer import Tokenizer

PromptStyle = Literal["deepseek", "ds4"]

SYSTEM_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "function")
ROLES = (*SYSTEM_ROLES, "user", "assistant", *TOOL_ROLES)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call an assistant made; arguments is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, whatever API it came through.

    reasoning: what an assistant thought before the content. tool_calls belong to assistants, tool_call_id to tool results.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text; special literals in it stay text."""

    text: str


@dataclass(frozen=True, slots=True)
class Special:
    """One special token, by its literal."""

    literal: str


Segment = Text | Special


def render(messages: Sequence[Message], *, thinking: bool, style: PromptStyle = "deepseek") -> list[Segment]:
    """Render a conversation up to the point where the model answers.

    All system and developer messages come first, joined by blank lines, wherever they stood. In style "deepseek" user turns
    that follow one another become one turn, joined by a blank line; in style "ds4" each opens its own `<｜User｜>`.
    Only what the assistant thought since the last user turn is kept: older reasoning costs context and was not there in training.

    A conversation that ends with a user turn gets `<｜Assistant｜>` and `<think>` or `</think>`. One that ends with an assistant
    turn gets nothing more: that turn is finished (as in ds4), so it is not a way to prefill an answer.

    Raises RequestError naming the message at fault.
    """
    if style not in get_args(PromptStyle):
        raise ConfigError(f"prompt style: got {style!r}, expected one of {get_args(PromptStyle)}")
    _check(messages)
    last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
    segments: list[Segment] = [Special(BOS), Text(_system_region(messages))]
    user_is_waiting = False
    for i, message in enumerate(messages):
        if message.role == "user":
            merge = user_is_waiting and style == "deepseek"
            segments += [Text("\n\n") if merge else Special(USER), Text(message.content)]
            user_is_waiting = True
        elif message.role == "assistant":
            # Without a user turn to answer there is no marker: the text continues what stands before.
            if user_is_waiting:
                segments += [Special(ASSISTANT), *_reasoning(message, keep=thinking and i > last_user)]
            segments += [Text(message.content), Special(EOS)]
            user_is_waiting = False
    if user_is_waiting:
        segments += [Special(ASSISTANT), Special(THINK if thinking else END_THINK)]
    return _join_texts(segments)


def opens_reasoning(segments: Sequence[Segment]) -> bool:
    """Whether what the model writes next is reasoning. Not always so in thinking mode: see `render` on a last assistant turn."""
    return bool(segments) and segments[-1] == Special(THINK)


def stop_ids(tokenizer: Tokenizer, *, thinking: bool) -> frozenset[int]:
    """Ids that end a reply: EOS, and without thinking the think tags too, which have no place there."""
    ids = {tokenizer.eos_id} if thinking else {tokenizer.eos_id, tokenizer.think_id, tokenizer.end_think_id}
    return frozenset(i for i in ids if i is not None)


def to_ids(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Encode a prompt. Raises TokenizerError if the vocabulary lacks a special token, RequestError for a lone surrogate.

    Special tokens part the text into spans that are encoded one by one, so a longer conversation starts with the very ids of
    the shorter one, and the cache of a slot can be used again.
    """
    ids: list[int] = []
    for segment in _join_texts(segments):
        if isinstance(segment, Text):
            ids += tokenizer.encode(segment.text)
            continue
        token_id = tokenizer.id_of(segment.literal)
        if token_id is None:
            raise TokenizerError(f"the vocabulary has no special token {segment.literal}; is this a DeepSeek V4 file?")
        ids.append(token_id)
    return ids


def to_text(segments: Iterable[Segment]) -> str:
    """Show a prompt to people. Encoding this text again would honour literals in messages: use `to_ids`."""
    return "".join(s.text if isinstance(s, Text) else s.literal for s in segments)


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise RequestError("messages: the list is empty; send at least one message", "messages")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise RequestError(f"messages[{i}].role: got {message.role!r}, expected one of {', '.join(ROLES)}", f"messages[{i}].role")
        if message.role in TOOL_ROLES or message.tool_calls or message.tool_call_id is not None:
            raise RequestError(f"messages[{i}]: tools are not supported yet; leave out tool calls and their results", f"messages[{i}]")


def _system_region(messages: Sequence[Message]) -> str:
    return "\n\n".join(m.content for m in messages if m.role in SYSTEM_ROLES and m.content)


def _reasoning(message: Message, *, keep: bool) -> list[Segment]:
    """What stands between `<｜Assistant｜>` and the content of a finished turn."""
    return [Special(THINK), Text(message.reasoning or ""), Special(END_THINK)] if keep else [Special(END_THINK)]


def _join_texts(segments: Iterable[Segment]) -> list[Segment]:
    """Join neighbouring texts, since a merge may cross their border, and drop empty ones."""
    joined: list[Segment] = []
    for is_text, run in groupby(segments, lambda s: isinstance(s, Text)):
        if not is_text:
            joined += run
        elif text := to_text(run):
            joined.append(Text(text))
    return joined
