"""Prompts made by a Jinja template, for whoever wants other ones than `chat.render` makes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ds4jax.errors import ConfigError, RequestError
from ds4jax.text.chat import SYSTEM_ROLES, TOOL_ROLES, Message, check
from ds4jax.text.dsml import Tool
from ds4jax.text.effort import Thinking
from ds4jax.text.segments import Segment, Special, Text, join_texts
from ds4jax.text.special import ALWAYS_ADDED, BOS, EOS

_GUARD = "\ufdd0"  # a noncharacter: Unicode promises that it means nothing in any text


class ChatTemplate:
    """A template in the form that models come with: it sees `messages`, `tools`, `add_generation_prompt` and so on.

    It runs in Jinja's sandbox, since files from elsewhere bring templates along. What it writes itself may hold special tokens; what
    users and tools say stays text, as in `chat.render`.
    """

    def __init__(self, source: str, literals: Iterable[str] = ALWAYS_ADDED) -> None:
        """Compile a template, and try it on a greeting. Raises ConfigError that says what is wrong with it.

        literals: the special tokens that its text may hold.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._literals = re.compile("(" + "|".join(map(re.escape, sorted(literals, key=len, reverse=True))) + ")")
        try:
            self._template = environment.from_string(source)
            self.render([Message("user", "Hello!")], thinking=Thinking.HIGH)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template, line {error.lineno}: {error.message}; correct it, or leave it out") from None
        except RequestError as error:
            raise ConfigError(f"the chat template cannot render a single user message: {error}; use another") from None

    def render(self, messages: Sequence[Message], *, thinking: bool | Thinking, tools: Sequence[Tool] = ()) -> list[Segment]:
        """Render a conversation. Raises RequestError with what the template has against it."""
        check(messages)
        try:
            text = self._template.render(
                messages=[self._guarded(_message(message)) for message in messages],
                tools=[self._guarded(_tool(tool)) for tool in tools] or None,
                add_generation_prompt=messages[-1].role != "assistant",
                bos_token=BOS,
                eos_token=EOS,
                thinking=bool(thinking),
                enable_thinking=bool(thinking),
                reasoning_effort=("max" if thinking is Thinking.MAX else "high") if thinking else None,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise RequestError(f"messages: the server's chat template refuses them ({error})", "messages") from None
        parts = self._literals.split(text)
        return join_texts(Special(part) if i % 2 else Text(part.replace(_GUARD, "")) for i, part in enumerate(parts))

    def _guarded(self, value: Any) -> Any:
        """Break up what looks like special tokens, by a character that is taken out of the rendered text again."""
        if isinstance(value, str):
            return self._literals.sub(lambda found: found[0][0] + _GUARD + found[0][1:], value.replace(_GUARD, ""))
        if isinstance(value, dict):
            return {self._guarded(key): self._guarded(member) for key, member in value.items()}
        return [self._guarded(member) for member in value] if isinstance(value, list) else value


def _message(message: Message) -> dict[str, Any]:
    """Write a message with the members that templates look for; roles of one meaning have one name."""
    role = "system" if message.role in SYSTEM_ROLES else "tool" if message.role in TOOL_ROLES else message.role
    written: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning is not None:
        written["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _json_or_text(call.arguments)}}
            for call in message.tool_calls
        ]
    return written


def _tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": _json_or_text(tool.schema)}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON as templates expect it; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)
