"""Whether a model thinks before it answers: every spelling that clients use, resolved in one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ds4jax.errors import RequestError

# Ids that choose a mode when the request itself says nothing about it.
ALIASES: Mapping[str, bool] = {"deepseek-chat": False, "deepseek-reasoner": True}
EFFORTS = ("max", "xhigh", "high", "medium", "low", "minimal", "none")


Switch = bool | dict[str, Any] | None | msgspec.UnsetType
"""The value of `thinking`. A null differs from nothing at all: it counts as an explicit choice, of the default."""


class ThinkingFields(Protocol):
    """The members of a body that switch thinking on or off."""

    thinking: Switch
    think: bool | None
    reasoning_effort: str | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(frozen=True)
class Effort:
    """A further field with an effort, in APIs that nest it. decides: any effort there outweighs the model's alias."""

    field: str
    value: str | None
    decides: bool = False


def resolve(fields: ThinkingFields, model: str | None, *nested: Effort) -> bool:
    """Decide whether to think; without any hint, yes.

    An effort of "none" always means no. Then the first explicit switch counts (`thinking`, `think`, then
    `chat_template_kwargs.enable_thinking` and `.thinking`), then the model's alias. Raises RequestError naming the field.
    """
    efforts = [Effort("reasoning_effort", fields.reasoning_effort), *nested]
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
    if fields.think is not None:
        yield fields.think
    for key in ("enable_thinking", "thinking"):
        value = (fields.chat_template_kwargs or {}).get(key)
        if isinstance(value, bool):
            yield value
        elif value is not None:
            name = f"chat_template_kwargs.{key}"
            raise RequestError(f"{name}: got {value!r}, expected true or false", name)
