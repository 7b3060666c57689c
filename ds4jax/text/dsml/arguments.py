"""The JSON text of a call's arguments, written while the parameters come in."""

from __future__ import annotations

import json
import re

_SPACE_OUTSIDE_STRINGS = re.compile(r'("(?:[^"\\]|\\.)*")|\s+')


class ArgumentsWriter:
    """Write an object, and objects inside it, member by member; every method returns the text that it adds.

    Closing what is open gives a valid JSON object at any time between two members.
    """

    def __init__(self) -> None:
        self._is_empty: list[bool] = []

    @property
    def depth(self) -> int:
        """Objects that are open."""
        return len(self._is_empty)

    def open_object(self) -> str:
        self._is_empty.append(True)
        return "{"

    def close_object(self) -> str:
        self._is_empty.pop()
        return "}"

    def key(self, name: str) -> str:
        """Begin a member; its value follows."""
        comma = "" if self._is_empty[-1] else ","
        self._is_empty[-1] = False
        return f"{comma}{_quoted(name)}:"


class JsonStrings:
    """Tell, while a JSON text comes in, whether its end stands inside a string.

    n_inside: characters of that string so far; None outside. is_escaped: whether the last character takes the next one's meaning.
    """

    def __init__(self) -> None:
        self.n_inside: int | None = None
        self.is_escaped = False

    def feed(self, text: str) -> None:
        """Read on."""
        for character in text:
            if self.n_inside is None:
                self.n_inside = 0 if character == '"' else None
            elif character == '"' and not self.is_escaped:
                self.n_inside = None
            else:
                self.n_inside += 1
                self.is_escaped = character == "\\" and not self.is_escaped


def string_body(text: str) -> str:
    """Escape text that stands inside a JSON string, quotes left out. The pieces of a text give what the whole text gives."""
    return _quoted(text)[1:-1]


def compact(text: str) -> str | None:
    """Drop the white space of a JSON text that means nothing; None if it is no JSON. Numbers and escapes stay as they are written."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _SPACE_OUTSIDE_STRINGS.sub(lambda match: match.group(1) or "", text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
