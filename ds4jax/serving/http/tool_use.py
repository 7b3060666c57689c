"""What a call may do with tools, whatever API it came through."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from ds4jax.text.dsml import DsmlParser, Tool, call_opening
from ds4jax.text.segments import Segment


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

    def parser(self) -> DsmlParser:
        """Make the parser of one reply."""
        return DsmlParser(lambda: self.id_prefix + uuid.uuid4().hex, parallel=self.parallel)
