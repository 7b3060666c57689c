"""What a call may do with tools, whatever API it came through."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from ds4jax.errors import RequestError
from ds4jax.serving.engine.api import SamplingParams
from ds4jax.text.dsml import CallZones, DsmlParser, StrictCalls, Tool, call_opening
from ds4jax.text.segments import Segment, to_text
from ds4jax.text.tokenizer import Tokenizer

NO_IMAGE = "[an image, which you cannot see: you read text alone]"
"""Shown to the model for an image that a tool gave."""


@dataclass(frozen=True)
class ToolUse:
    """The tools that a reply may call, at least one.

    parallel: whether it may call several; is_forced: it must call one, namely `forced_name` if that is given; id_prefix: how the ids
    of its calls start.
    """

    tools: Sequence[Tool]
    parallel: bool = True
    is_forced: bool = False
    forced_name: str | None = None
    id_prefix: str = "call_"

    @property
    def opening(self) -> list[Segment]:
        """What the prompt ends with so that the reply has to go on with a call. It leaves no room for reasoning before it."""
        return call_opening(self.forced_name) if self.is_forced else []

    @property
    def strict_calls(self) -> StrictCalls | None:
        """What the calls have to look like, from where the model writes them; None where nobody asks for it."""
        if not self.is_forced:
            return StrictCalls(self.tools, "block", self.parallel) if any(tool.is_strict for tool in self.tools) else None
        if self.forced_name is None:
            return StrictCalls(self.tools, "call", self.parallel)
        named_first = sorted(self.tools, key=lambda tool: tool.name != self.forced_name)
        return StrictCalls(named_first, "parameters", self.parallel)

    def zones(self, sampling: SamplingParams, tokenizer: Tokenizer) -> Callable[[], CallZones] | None:
        """What follows a reply to draw the structure of its calls greedily; None where all of it is drawn so."""
        if sampling.temperature <= 0:
            return None
        return partial(CallZones, tokenizer.token_bytes, to_text(self.opening))

    def parser(self) -> DsmlParser:
        """Make the parser of one reply."""
        return DsmlParser(lambda: self.id_prefix + uuid.uuid4().hex, parallel=self.parallel)


def settle(
    tools: Sequence[Tool],
    mode: Literal["auto", "none", "required"] = "auto",
    name: str | None = None,
    *,
    parallel: bool = True,
    id_prefix: str = "call_",
) -> ToolUse | None:
    """Settle what a reply may call; None if nothing.

    name: of the one tool that it has to call, whatever the mode. Raises RequestError if `tool_choice` asks for what is not there.
    """
    if name is not None and name not in [tool.name for tool in tools]:
        raise RequestError(f"tool_choice: {name!r} is not among the tools; name one of them", "tool_choice")
    is_forced = mode == "required" or name is not None
    if is_forced and not tools:
        raise RequestError("tool_choice: a call is required, but there are no tools; send some", "tool_choice")
    return ToolUse(tools, parallel, is_forced, name, id_prefix) if tools and mode != "none" else None


def function_tool(name: str, description: str | None, parameters: bytes | None, *, is_strict: bool = False) -> Tool:
    """Describe a tool as the model knows tools, whatever API it came through.

    parameters: the JSON text of a schema. It stays byte for byte, so that a prompt changes only when a client's text does.
    """
    schema: dict[str, str | msgspec.Raw] = {"name": name}
    if description is not None:
        schema["description"] = description
    if parameters is not None:
        schema["parameters"] = msgspec.Raw(parameters.strip())
    return Tool(name, msgspec.json.encode(schema).decode(), is_strict)
