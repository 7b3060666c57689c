"""Whether a model thinks before it answers: every spelling that clients use, resolved in one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ds4jax.errors import RequestError
from ds4jax.text.effort import Thinking

# Ids that choose a mode when the request itself says nothing about it.
ALIASES: Mapping[str, bool] = {"deepseek-chat": False, "deepseek-reasoner": True}
EFFORTS = ("max", "xhigh", "high", "medium", "low", "minimal", "none")


Switch = bool | dict[str, Any] | None | msgspec.UnsetType
"""The value of `thinking`. A null differs from nothing at all: it counts as an explicit choice, of the default."""


class ThinkingFields(Protocol):
    """The members of a body that switch thinking on or off."""

    thinking: Switch
    think: bool | None
    enable_thinking: bool | None
    reasoning_effort: str | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(frozen=True)
class Effort:
    """A further field with an effort, in APIs that nest it. decides: any effort there outweighs the model's alias."""

    field: str
    value: str | None
    decides: bool = False


def resolve(fields: ThinkingFields, model: str | None, *nested: Effort) -> Thinking:
    """Decide whether to think, and how hard; without any hint, Thinking.HIGH.

    An effort of "none" always means no. Then the first explicit switch counts (`thinking`, `think`, `enable_thinking`, then
    `chat_template_kwargs.enable_thinking` and `.thinking`), then the model's alias. An effort of "max" anywhere means Thinking.MAX, if
    there is thinking at all. Raises RequestError naming the field.
    """
    efforts = [Effort("reasoning_effort", fields.reasoning_effort), _template_effort(fields), *nested]
    if not _is_on(fields, model, efforts):
        return Thinking.OFF
    return Thinking.MAX if any(effort.value == "max" for effort in efforts) else Thinking.HIGH


def _is_on(fields: ThinkingFields, model: str | None, efforts: Sequence[Effort]) -> bool:
    for effort in efforts:
        if effort.value is not None and effort.value not in EFFORTS:
            raise RequestError(f"{effort.field}: got {effort.value!r}, expected one of {', '.join(EFFORTS)}", effort.field)
    explicit = list(_switches(fields))  # all of them, so that a wrong one is told even if another decides
    if any(effort.value == "none" for effort in efforts):
        return False
    if explicit:
        return explicit[0]
    return any(effort.decides and effort.value for effort in efforts) or ALIASES.get(model or "", True)


def _switches(fields: ThinkingFields) -> Iterator[bool]:
    match fields.thinking:
        case msgspec.UNSET:
            pass
        case None | True | {"type": "enabled" | "adaptive"}:
            yield True
        case False | {"type": "disabled"}:
            yield False
        case _:
            raise RequestError('thinking: expected true, false, {"type": "enabled"} or {"type": "disabled"}', "thinking")
    yield from (switch for switch in (fields.think, fields.enable_thinking) if switch is not None)
    for key in ("enable_thinking", "thinking"):
        value = (fields.chat_template_kwargs or {}).get(key)
        if isinstance(value, bool):
            yield value
        elif value is not None:
            name = f"chat_template_kwargs.{key}"
            raise RequestError(f"{name}: got {value!r}, expected true or false", name)


def _template_effort(fields: ThinkingFields) -> Effort:
    """The effort among the arguments of a chat template."""
    name, value = "chat_template_kwargs.reasoning_effort", (fields.chat_template_kwargs or {}).get("reasoning_effort")
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name}: got {value!r}, expected one of {', '.join(EFFORTS)}", name)
    return Effort(name, value)
