"""Tools, calls, and what a stream says about calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool that the model may call.

    schema: the JSON text that describes it, shown to the model as it is. is_strict: calls have to follow it.
    """

    name: str
    schema: str
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call an assistant made; arguments is the JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; index counts the calls of a reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is whole: its pieces together are the JSON text of an object."""

    index: int


CallEvent = CallStart | ArgumentsDelta | CallEnd


class CallCollector:
    """Put the calls of a reply together again."""

    def __init__(self) -> None:
        self._starts: list[CallStart] = []
        self._arguments: list[list[str]] = []
        self.calls: list[ToolCall] = []
        """The whole calls. One that was cut or went wrong is none."""

    @property
    def n_started(self) -> int:
        """Calls that have begun, the whole ones included."""
        return len(self._starts)

    def take(self, events: Iterable[CallEvent]) -> None:
        """Take what happened next."""
        for event in events:
            match event:
                case CallStart():
                    self._starts.append(event)
                    self._arguments.append([])
                case ArgumentsDelta():
                    self._arguments[event.index].append(event.text)
                case CallEnd():
                    start = self._starts[event.index]
                    self.calls.append(ToolCall(start.id, start.name, "".join(self._arguments[event.index])))
