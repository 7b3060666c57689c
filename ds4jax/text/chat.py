"""Messages to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Literal, get_args

from ds4jax.errors import ConfigError, RequestError
from ds4jax.text.dsml import Tool, ToolCall, call_block, replayed_block, tool_prompt, tool_result
from ds4jax.text.effort import MAX_EFFORT, Thinking
from ds4jax.text.segments import Segment, Special, Text, join_texts
from ds4jax.text.special import ASSISTANT, BOS, END_THINK, EOS, THINK, USER
from ds4jax.text.tokenizer import Tokenizer

__all__ = ["Message", "PromptStyle", "ToolCall", "complaint", "opens_reasoning", "render", "stop_ids"]

PromptStyle = Literal["deepseek", "ds4"]

SYSTEM_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "function")
ROLES = (*SYSTEM_ROLES, "user", "assistant", *TOOL_ROLES)


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


def render(
    messages: Sequence[Message],
    *,
    thinking: bool | Thinking,
    style: PromptStyle = "deepseek",
    tools: Sequence[Tool] = (),
    tool_text: str | None = None,
    recall: Callable[[Sequence[ToolCall]], str | None] = lambda calls: None,
) -> list[Segment]:
    """Render a conversation up to the point where the model answers.

    The system and developer messages that come first begin the prompt, joined by blank lines, and the tools with them: after them in
    style "deepseek", before them in style "ds4". Later ones are told where they stand, as reminders in a turn of the user: agents add
    some as they go on, and no cache would fit a prompt whose beginning changes. In style "ds4" they come first too.

    In style "deepseek" what users and tools say in a row becomes one turn, joined by blank lines, with results in the order of their
    calls; in style "ds4" each user message opens its own `<｜User｜>`, and so does each run of results.

    What the assistant thought before the last user turn is dropped, as it was in training, unless the conversation has to do with
    tools: then thoughts lead from one call to the next, and all are kept.

    Thinking.MAX puts MAX_EFFORT before everything else. True means Thinking.HIGH.

    A conversation that ends with a turn of the user or a tool gets `<｜Assistant｜>` and `<think>` or `</think>`. One that ends with an
    assistant turn gets nothing more: that turn is finished (as in ds4), so it is not a way to prefill an answer.

    Args:
        tools: what the model may call; with none, it is told nothing about calls.
        tool_text: how it is told of them, as `tool_prompt` takes it; None for our words.
        recall: gives the very text in which the model made some calls, or None, which has it written anew.

    Raises RequestError naming the message at fault.
    """
    if style not in get_args(PromptStyle):
        raise ConfigError(f"prompt style: got {style!r}, expected one of {get_args(PromptStyle)}")
    check(messages)
    head, turns = _part(messages, style)
    if style == "deepseek":
        turns = _in_order_of_calls(turns)
    last_user = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    keeps_all = bool(tools) or any(turn.tool_calls or turn.role in TOOL_ROLES for turn in turns)
    segments: list[Segment] = [
        Special(BOS),
        Text(MAX_EFFORT if thinking is Thinking.MAX else ""),
        *_system_region(head, tools, style, tool_text),
    ]
    before: Message | None = None
    for i, turn in enumerate(turns):
        user_is_waiting = before is not None and before.role != "assistant"
        if turn.role == "assistant":
            # Without a turn to answer there is no marker: the text continues what stands before.
            if user_is_waiting:
                segments += [Special(ASSISTANT), *_reasoning(turn, keep=bool(thinking) and (keeps_all or i > last_user))]
            segments += [Text(turn.content), *_calls(turn, recall), Special(EOS)]
        else:
            segments += _opening(turn, before if user_is_waiting else None, style)
            segments.append(_told(turn))
        before = turn
    if before is not None and before.role != "assistant":
        segments += [Special(ASSISTANT), Special(THINK if thinking else END_THINK)]
    return join_texts(segments)


def complaint(reason: str, *, thinking: bool) -> list[Segment]:
    """End the turn that the model has just written, tell it why its call could not be read, and let it answer again."""
    text = f"No tool was run: the call could not be read ({reason}). Write it again, in the form that the section Tools prescribes."
    return [Special(EOS), Special(USER), tool_result(text), Special(ASSISTANT), Special(THINK if thinking else END_THINK)]


def opens_reasoning(segments: Sequence[Segment]) -> bool:
    """Whether what the model writes next is reasoning. Not always so in thinking mode: see `render` on a last assistant turn.

    White space may follow the tag: templates write some.
    """
    tail = next((s for s in reversed(segments) if not isinstance(s, Text) or s.text.strip()), None)
    return tail == Special(THINK)


def stop_ids(tokenizer: Tokenizer, *, thinking: bool) -> frozenset[int]:
    """Ids that end a reply: EOS, and without thinking the think tags too, which have no place there."""
    ids = {tokenizer.eos_id} if thinking else {tokenizer.eos_id, tokenizer.think_id, tokenizer.end_think_id}
    return frozenset(i for i in ids if i is not None)


def check(messages: Sequence[Message]) -> None:
    """Raise RequestError naming the message that cannot be part of a conversation, if there is one."""
    if not messages:
        raise RequestError("messages: the list is empty; send at least one message", "messages")
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            raise RequestError(f"messages[{i}].role: got {message.role!r}, expected one of {', '.join(ROLES)}", f"messages[{i}].role")
        if message.tool_calls and message.role != "assistant":
            place = f"messages[{i}].tool_calls"
            raise RequestError(f"{place}: only an assistant calls tools, and this is a message of role {message.role!r}", place)


def _part(messages: Sequence[Message], style: PromptStyle) -> tuple[list[Message], list[Message]]:
    """Part what begins the prompt from the turns; messages of the system that say nothing are in neither."""
    said = [message for message in messages if message.content or message.role not in SYSTEM_ROLES]
    if style == "deepseek":
        head = list(takewhile(lambda message: message.role in SYSTEM_ROLES, said))
        return head, said[len(head) :]
    return [m for m in said if m.role in SYSTEM_ROLES], [m for m in said if m.role not in SYSTEM_ROLES]


def _told(turn: Message) -> Text:
    """What a turn that waits for an answer tells the model."""
    if turn.role in TOOL_ROLES:
        return tool_result(turn.content)
    return Text(turn.content if turn.role == "user" else f"<system-reminder>\n{turn.content}\n</system-reminder>")


def _system_region(head: Sequence[Message], tools: Sequence[Tool], style: PromptStyle, tool_text: str | None) -> list[Segment]:
    text = "\n\n".join(message.content for message in head)
    if not tools:
        return [Text(text)]
    between = [Text("\n\n")] if text else []
    about = tool_prompt(tools, tool_text)
    return [Text(text), *between, *about] if style == "deepseek" else [*about, *between, Text(text)]


def _in_order_of_calls(turns: Sequence[Message]) -> list[Message]:
    """Sort results that stand in a row as the assistant made the calls; tools finish in any order, which means nothing."""
    ordered: list[Message] = []
    place: dict[str | None, int] = {}
    for _, run in groupby(turns, lambda turn: turn.role in TOOL_ROLES):
        in_a_row = list(run)
        if in_a_row[0].role in TOOL_ROLES:
            in_a_row.sort(key=lambda turn: place.get(turn.tool_call_id, len(place)))
        ordered += in_a_row
        if ordered[-1].role == "assistant":
            place = {call.id: i for i, call in enumerate(ordered[-1].tool_calls)}
    return ordered


def _opening(turn: Message, before: Message | None, style: PromptStyle) -> list[Segment]:
    """What parts a turn of the user or a tool from the one before it that waits for an answer too."""
    if before is None:
        return [Special(USER)]
    if style == "deepseek":
        return [Text("\n\n")]
    return [] if turn.role in TOOL_ROLES and before.role in TOOL_ROLES else [Special(USER)]


def _reasoning(message: Message, *, keep: bool) -> list[Segment]:
    """What stands between `<｜Assistant｜>` and the content of a finished turn."""
    return [Special(THINK), Text(message.reasoning or ""), Special(END_THINK)] if keep else [Special(END_THINK)]


def _calls(message: Message, recall: Callable[[Sequence[ToolCall]], str | None]) -> list[Segment]:
    if not message.tool_calls:
        return []
    text = recall(message.tool_calls)
    return call_block(message.tool_calls) if text is None else replayed_block(text)
