"""Read one block of calls, piece by piece, from behind its opening tag to its end."""

from __future__ import annotations

import re
from collections.abc import Callable

from ds4jax.text.dsml.arguments import ArgumentsWriter, JsonStrings, compact, string_body
from ds4jax.text.dsml.calls import ArgumentsDelta, CallEnd, CallEvent, CallStart
from ds4jax.text.dsml.markup import ENTITY_BEGUN, LONGEST_TAG, Markup, unescape

DEEPEST = 16
"""Objects inside objects that parameters inside parameters may make."""

_ATTRIBUTE = re.compile(r'\s(\w+)\s*=\s*"([^"]*)"')


class BlockParser:
    """Turn the text of a block into events, each as early as no further text can change it.

    What a model leaves out is put up with where the meaning is plain: the end tag of a parameter, call or outer parameter whose
    surroundings end, and at the end of the text all end tags. Anything else ends the block with an `error`.

    Args:
        markup: the spelling of its opening tag; all other tags must have it too.
        new_id: makes the id of a call.
        parallel: whether the block may hold more than one call; if not, it ends with the first.
    """

    def __init__(self, markup: Markup, new_id: Callable[[], str], *, parallel: bool) -> None:
        self._markup, self._new_id, self._parallel = markup, new_id, parallel
        self._rest = ""
        self._read: list[str] = []
        self._events: list[CallEvent] = []
        self._arguments = ArgumentsWriter()
        self._json: list[str] | None = None  # the pieces of a value that is no string
        self._json_strings = JsonStrings()
        self._n_string = 0  # characters of a value that is one
        # The state is the method that reads on from here; it returns whether more can be read now.
        self._step: Callable[[], bool] = self._between_calls
        self.n_started = 0
        self.is_done = False
        self.error: str | None = None

    @property
    def text(self) -> str:
        """All text so far, end tags that were left out at the end included."""
        return "".join(self._read) + self._rest

    @property
    def n_payload(self) -> int | None:
        """Characters so far of the string in which the text stands: a value, or a string of a JSON value. None in tags and in other JSON.

        Where two characters of an end tag stand, the text is in a tag.
        """
        if self._step == self._undecided:  # a string, unless a parameter begins
            return len(self._rest) if len(self._rest.lstrip()) < len("</") else None
        if self._step != self._in_value or self._rest.startswith("</"):
            return None
        n_read = self._n_string if self._json is None else self._json_strings.n_inside
        return None if n_read is None else n_read + len(self._rest)

    @property
    def has_pending(self) -> bool:
        """Whether the next character can change the meaning of the last ones."""
        return bool(self._rest) or self._json_strings.is_escaped

    def feed(self, text: str) -> list[CallEvent]:
        """Read on; once the block is done or broken, nothing more comes of it."""
        self._rest += text
        while not self.is_done and self.error is None and self._step():
            pass
        return self._drain()

    def finish(self) -> list[CallEvent]:
        """End the text, where the model itself ended it: close what is open, or say in `error` why that makes no sense."""
        if self.is_done or self.error is not None:
            return []
        if self._step == self._undecided:
            self._start_value("true")
        if self._step == self._in_value:
            self._finish_value()
        elif not (rest := self._rest.strip()).startswith("</") and rest:
            self._fail("the text ends inside a tag")
        if self.n_started == 0:
            self._fail("the text ends before the first call")
        if self.error is None:
            self._rest = ""
            self._close_all()
        return self._drain()

    # ------------------------------------------------------------ states
    def _between_calls(self) -> bool:
        self._skip_space()
        markup = self._markup
        if self._rest.startswith(markup.block_end):
            self._take(len(markup.block_end))
            if self.n_started == 0:
                return self._fail("the block holds no call")
            self.is_done = True
            return False
        if self._rest.startswith(markup.invoke):
            return self._open_call()
        return self._wait_for(markup.block_end, markup.invoke)

    def _in_call(self) -> bool:
        self._skip_space()
        markup = self._markup
        if self._rest.startswith(markup.parameter):
            return self._open_parameter()
        if self._arguments.depth > 1 and self._rest.startswith(markup.parameter_end):
            self._take(len(markup.parameter_end))
            self._write(self._arguments.close_object())
            return True
        if self._rest.startswith(markup.invoke_end):
            self._take(len(markup.invoke_end))
            return self._close_call()
        if self._rest.startswith((markup.block_end, markup.invoke)):  # the end tag of the call was left out
            return self._close_call()
        ends = [markup.parameter_end] if self._arguments.depth > 1 else []
        return self._wait_for(markup.parameter, markup.invoke_end, markup.block_end, markup.invoke, *ends)

    def _undecided(self) -> bool:
        """Stand at the start of a value of which nobody said whether it is a string: it may be parameters."""
        start, ahead = self._markup.parameter, self._rest.lstrip()
        if start.startswith(ahead):
            return False
        if not ahead.startswith(start) or not ahead[len(start)].isspace():
            return self._start_value("true")
        if self._arguments.depth == DEEPEST:
            return self._fail(f"parameters inside parameters more than {DEEPEST} deep")
        self._write(self._arguments.open_object())
        self._step = self._in_call
        return True

    def _in_value(self) -> bool:
        end = self._markup.value_end.search(self._rest)
        if end is not None:
            self._add_to_value(self._take(end.start()))
            self._take(end.end() - end.start())
            return self._close_value()
        begun = self._markup.value_end_begun.search(self._rest)
        if begun is None and self._json is None:
            begun = ENTITY_BEGUN.search(self._rest)
        self._add_to_value(self._take(begun.start() if begun else len(self._rest)))
        return False

    # ------------------------------------------------------------ tags
    def _open_call(self) -> bool:
        attributes = self._attributes(self._markup.invoke)
        if attributes is None:
            return False
        if not attributes.get("name"):
            return self._fail("a call has no name")
        self._events.append(CallStart(self.n_started, self._new_id(), attributes["name"]))
        self.n_started += 1
        self._write(self._arguments.open_object())
        self._step = self._in_call
        return True

    def _open_parameter(self) -> bool:
        attributes = self._attributes(self._markup.parameter)
        if attributes is None:
            return False
        if "name" not in attributes:
            return self._fail("a parameter has no name")
        self._write(self._arguments.key(attributes["name"]))
        if "string" in attributes:
            return self._start_value(attributes["string"])
        self._step = self._undecided
        return True

    def _attributes(self, start: str) -> dict[str, str] | None:
        """Take a whole opening tag; None if it is not here yet, or is no tag."""
        end = self._rest.find(">")
        if end > LONGEST_TAG or (end < 0 and len(self._rest) > LONGEST_TAG):
            self._fail(f"a tag is longer than {LONGEST_TAG} characters")
            return None
        if end < 0:
            return None
        return {name: unescape(value) for name, value in _ATTRIBUTE.findall(self._take(end + 1)[len(start) :])}

    def _start_value(self, string: str) -> bool:
        self._json, self._json_strings, self._n_string = [] if string == "false" else None, JsonStrings(), 0
        if self._json is None:
            self._write('"')
        self._step = self._in_value
        return True

    def _add_to_value(self, text: str) -> None:
        if self._json is None:
            self._n_string += len(text)
            self._write(string_body(unescape(text)))
        else:
            self._json.append(text)
            self._json_strings.feed(text)

    def _close_value(self) -> bool:
        if self._json is None:
            self._write('"')
        else:
            text = "".join(self._json)
            # What is said to be JSON and is not can only be meant as a string; the arguments stay readable either way.
            self._write(compact(text) or f'"{string_body(text)}"')
        self._step = self._in_call
        return True

    def _close_call(self) -> bool:
        while self._arguments.depth:
            self._write(self._arguments.close_object())
        self._events.append(CallEnd(self.n_started - 1))
        self._step = self._between_calls
        if not self._parallel:
            self._close_all()
        return True

    # ------------------------------------------------------------ ends
    def _finish_value(self) -> None:
        begun = self._markup.value_end_begun.search(self._rest)
        # A lone "<" may well belong to the value; more than that was an end tag.
        is_tag = begun is not None and len(self._rest) - begun.start() > len("</")
        self._add_to_value(self._take(begun.start() if begun and is_tag else len(self._rest)))
        if self._json is not None and compact("".join(self._json)) is None:
            self._fail("the text ends inside a value")
            return
        self._close_value()
        self._rest = ""
        self._read.append(self._markup.parameter_end)

    def _close_all(self) -> None:
        if self._arguments.depth:
            self._read += [self._markup.parameter_end] * (self._arguments.depth - 1) + ["\n" + self._markup.invoke_end]
            self._close_call()
        if not self.is_done:
            self._rest = ""
            self._read.append("\n" + self._markup.block_end)
            self.is_done = True

    def _fail(self, reason: str) -> bool:
        self.error = self.error or reason
        return False

    def _wait_for(self, *tags: str) -> bool:
        """Wait for the rest of one of some tags."""
        if not any(tag.startswith(self._rest) for tag in tags):
            self._fail(f"expected {' or '.join(tags)}")
        return False

    # ------------------------------------------------------------ text
    def _skip_space(self) -> None:
        self._take(len(self._rest) - len(self._rest.lstrip()))

    def _take(self, n: int) -> str:
        taken, self._rest = self._rest[:n], self._rest[n:]
        self._read.append(taken)
        return taken

    def _write(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self.n_started - 1, text))

    def _drain(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events
