"""Generated tokens to deltas, piece by piece.

Each stage holds back only what the next piece could still change, and gives in the end the same text however the bytes
were cut into pieces. The order of the stages decides what they see:

    bytes -> Utf8Decoder -> StopStrings -> DsmlParser (where tools are at hand) -> calls
                                                      `-> ReasoningSplitter -> deltas

Stop strings therefore match the whole raw generation, reasoning and tags included, and a match is never sent. A block of calls
inside the reasoning ends it, since a call is never a mere thought.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ds4jax.text.dsml import ArgumentsDelta, CallEvent, DsmlParser, ParserEvent, Rejected
from ds4jax.text.special import END_THINK, THINK

Kind = Literal["reasoning", "content"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the reply that can be sent."""

    kind: Kind
    text: str


class Utf8Decoder:
    """Decode bytes that arrive cut anywhere; hold an incomplete character (at most 3 bytes)."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """Decode what is whole by now; bytes that are no UTF-8 become U+FFFD."""
        return self._decoder.decode(data)

    @property
    def is_inside(self) -> bool:
        """Whether a character is incomplete."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """End the input: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Find the first of several strings in text that arrives in pieces.

    The match that starts earliest wins, the longest where several start together. So a match waits while a longer one, or one
    that starts before it, is still possible. Empty stop strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(filter(None, stops), key=len, reverse=True)
        self._longest = len(self._stops[0]) if self._stops else 1
        # Longest first: an alternation takes the first branch that fits. "(?!)" never fits.
        self._pattern = re.compile("|".join(map(re.escape, self._stops)) or "(?!)")
        self._held = ""
        self.hit: str | None = None
        self.n_cut = 0
        """Characters from the hit on, which nobody gets."""

    @property
    def n_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to send, and the stop string once it is certain. After a hit no text is safe."""
        if self.hit is not None:
            return "", self.hit
        text = self._held + text
        return self._take(text, open_at=self._first_open(text))

    def flush(self) -> tuple[str, str | None]:
        """End the input: what was held is safe, or holds a match that waited."""
        return self._take(self._held, open_at=len(self._held))

    def _take(self, text: str, open_at: int) -> tuple[str, str | None]:
        match = self._pattern.search(text)
        if match and match.start() < open_at:
            self._held, self.hit, self.n_cut = "", match.group(), len(text) - match.start()
            return text[: match.start()], self.hit
        self._held = text[open_at:]
        return text[:open_at], self.hit

    def _first_open(self, text: str) -> int:
        """Where the first stop string starts that could still become whole; the length of the text if none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)


class ReasoningSplitter:
    """Part the text of a generation at its first `</think>`.

    Args:
        thinking: whether the prompt has opened `<think>`. If not, all is content.

    A `<think>` at the very start only repeats the prompt and is dropped. Without `</think>` all stays reasoning: a reply cut
    by its length never turns thoughts into an answer.
    """

    def __init__(self, thinking: bool) -> None:
        self._at_start = thinking
        self._held = ""
        self.in_reasoning = thinking

    @property
    def n_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def feed(self, text: str) -> list[tuple[Kind, str]]:
        """Return the pieces that are certain by now, none of them empty."""
        if not self.in_reasoning:
            return _pieces(("content", text))
        text = self._held + text
        if self._at_start:
            if len(text) < len(THINK) and THINK.startswith(text):
                self._held = text
                return []
            self._at_start = False
            text = text.removeprefix(THINK)
        reasoning, tag, content = text.partition(END_THINK)
        if tag:
            self._held, self.in_reasoning = "", False
            return _pieces(("reasoning", reasoning), ("content", content))
        n_held = _overlap(text, END_THINK)
        self._held = text[len(text) - n_held :]
        return _pieces(("reasoning", text[: len(text) - n_held]))

    def flush(self) -> list[tuple[Kind, str]]:
        """End the input: half a tag was only text."""
        held, self._held = self._held, ""
        return _pieces(("reasoning", held))

    def end_reasoning(self) -> list[tuple[Kind, str]]:
        """Take what follows for content, `</think>` or not."""
        self.in_reasoning = False
        return self.flush()


class TextStream:
    """Turn the bytes of generated tokens into deltas, and into calls of tools.

    Args:
        thinking: whether the prompt has opened `<think>`.
        stops: stop strings.
        tools: reads the calls of a reply that may have some; without it, calls are text.
        opening: with which the prompt has begun the calls; no stop string matches in it.
    """

    def __init__(self, *, thinking: bool, stops: Sequence[str] = (), tools: DsmlParser | None = None, opening: str = "") -> None:
        self._decoder = Utf8Decoder()
        self._stops = StopStrings(stops)
        self._tools = tools
        self._splitter = ReasoningSplitter(thinking)
        self._calls: list[CallEvent] = []
        self.rejected: str | None = None
        """Why what looked like calls, outside the reasoning, was none."""
        self.n_characters = 0
        """Whole characters of the tokens fed, whatever became of them."""
        self._content_start, self._n_content = 0, 0
        self._read(opening)

    @property
    def stop_hit(self) -> str | None:
        """The stop string that ended the text, if one did. The caller then ends the request; what it still feeds is ignored."""
        return self._stops.hit

    @property
    def calls_ended(self) -> bool:
        """Whether a block of calls has ended the text, well or with an error. The caller then ends the request as for a stop string."""
        return self._tools is not None and self._tools.has_ended

    @property
    def in_reasoning(self) -> bool:
        """Whether the next token still belongs to the reasoning."""
        return self._splitter.in_reasoning

    @property
    def is_inside_character(self) -> bool:
        """Whether the last token has left a character incomplete."""
        return self._decoder.is_inside

    @property
    def n_settled(self) -> int:
        """Of n_characters those in front, of which nothing is held back any more: they were sent, or are known not to be text."""
        return self.n_characters - self._stops.n_held - self._splitter.n_held - (self._tools.n_held if self._tools else 0)

    @property
    def content_span(self) -> tuple[int, int]:
        """Where among n_characters the content begins, and where what was returned of it ends."""
        return self._content_start, self._content_start + self._n_content

    def feed(self, token: bytes, *, may_stop: bool = True) -> list[Delta]:
        """Take the bytes of one token or of several; return what can be sent: at most one delta of a kind, none empty.

        may_stop: whether stop strings count; a text that must be longer feeds its first tokens without. Calls are had from `take_calls`.
        """
        if self.stop_hit is not None:
            return []
        text = self._decoder.feed(token)
        self.n_characters += len(text)
        safe, hit = self._stops.feed(text) if may_stop else (text, None)
        pieces = self._read(safe)
        # After a stop string nothing can follow, so half a tag before it is text.
        return self._deltas(pieces if hit is None else pieces + self._end(whole=False))

    def finish(self, *, whole: bool = True) -> list[Delta]:
        """End the generation and return what was held back. Look at `stop_hit` once more: a match may have waited for this.

        whole: the model itself ended its reply, and so means a call whose end tags it left out; half a call of a cut reply is none.
        """
        if self.stop_hit is not None:
            return []
        half = self._decoder.flush()
        self.n_characters += len(half)
        safe, _ = self._stops.feed(half)
        rest, _ = self._stops.flush()
        return self._deltas(self._read(safe + rest) + self._end(whole=whole and self.stop_hit is None))

    def take_calls(self) -> list[CallEvent]:
        """Return what has happened to calls since the last time, neighbouring pieces of one call's arguments joined.

        All deltas come before the first call: a reply ends with its calls.
        """
        calls, self._calls = self._calls, []
        return calls

    def _deltas(self, pieces: Iterable[tuple[Kind, str]]) -> list[Delta]:
        """Join neighbours of one kind, and keep account of the content, of which there is one run."""
        deltas = _join_kinds(pieces)
        n_new = sum(len(delta.text) for delta in deltas if delta.kind == "content")
        if n_new and not self._n_content:
            self._content_start = self.n_settled - self._stops.n_cut - n_new
        self._n_content += n_new
        return deltas

    def _read(self, text: str) -> list[tuple[Kind, str]]:
        return self._take([text] if self._tools is None else self._tools.feed(text))

    def _end(self, *, whole: bool) -> list[tuple[Kind, str]]:
        pieces = [] if self._tools is None else self._take(self._tools.finish(whole=whole))
        return pieces + self._splitter.flush()

    def _take(self, events: Iterable[ParserEvent]) -> list[tuple[Kind, str]]:
        pieces: list[tuple[Kind, str]] = []
        for event in events:
            if isinstance(event, str):
                pieces += self._splitter.feed(event)
            elif not isinstance(event, Rejected):
                pieces += self._splitter.end_reasoning()
                self._add_call(event)
            elif not self.in_reasoning:
                self.rejected = event.reason
        return pieces

    def _add_call(self, event: CallEvent) -> None:
        last = self._calls[-1] if self._calls else None
        if isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and event.index == last.index:
            self._calls[-1] = ArgumentsDelta(event.index, last.text + event.text)
        else:
            self._calls.append(event)


def _pieces(*pieces: tuple[Kind, str]) -> list[tuple[Kind, str]]:
    return [piece for piece in pieces if piece[1]]


def _join_kinds(pieces: Iterable[tuple[Kind, str]]) -> list[Delta]:
    """Join neighbours of one kind."""
    deltas: list[Delta] = []
    for kind, text in pieces:
        if deltas and deltas[-1].kind == kind:
            text = deltas.pop().text + text
        deltas.append(Delta(kind, text))
    return deltas


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that starts the tag without being all of it."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
