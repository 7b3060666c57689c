"""Find the block of calls in the text of a reply, and read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds4jax.text.dsml.block import BlockParser
from ds4jax.text.dsml.calls import CallEvent
from ds4jax.text.dsml.markup import BLOCK, BLOCK_BEGUN, SPELLINGS
from ds4jax.text.special import DSML


@dataclass(frozen=True, slots=True)
class Rejected:
    """What looked like a block held no call, for this reason; its text follows as text."""

    reason: str


ParserEvent = str | CallEvent | Rejected
"""A string is text that belongs to no block; all of it comes before the first call."""


class DsmlParser:
    """Part the text of a reply into text and calls, piece by piece, with the same outcome however it is cut.

    White space before a block belongs to the block. A block that breaks before its first call has begun was no block: its text is
    given out as text. One that breaks later is an `error`, as its calls may have been told already.

    Args: as BlockParser's.
    """

    def __init__(self, new_id: Callable[[], str], *, parallel: bool = True) -> None:
        self._new_id, self._parallel = new_id, parallel
        self._held = ""
        self._opening = ""
        self._block: BlockParser | None = None
        self.was_repaired = False  # the model left out end tags

    @property
    def has_ended(self) -> bool:
        """Whether nothing that follows matters: the block is whole, or it is broken."""
        return self._block is not None and (self._block.is_done or self._block.error is not None)

    @property
    def error(self) -> str | None:
        """What is wrong with a block of which calls have been told."""
        return self._block.error if self._block is not None else None

    @property
    def block_text(self) -> str | None:
        """The text of a whole block, the white space before it included; end tags that the model left out at its end are there."""
        return self._opening + self._block.text if self._block is not None and self._block.is_done else None

    @property
    def is_inside(self) -> bool:
        """Whether the text stands inside a block, behind its opening tag."""
        return self._block is not None and not self.has_ended

    @property
    def begun(self) -> str:
        """The beginning of an opening tag with which the text ends, if it does; empty inside a block and behind it."""
        return self._held.lstrip()

    @property
    def n_payload(self) -> int | None:
        """See `BlockParser.n_payload`; None outside."""
        return self._block.n_payload if self._block is not None and not self.has_ended else None

    @property
    def has_pending(self) -> bool:
        """Whether the next character can change the meaning of the last ones."""
        if self._block is None:
            return bool(self._held)
        return self._block.has_pending and not self.has_ended

    @property
    def n_held(self) -> int:
        """Characters that may still turn out to be text."""
        if self._block is None:
            return len(self._held)
        return 0 if self._block.n_started else len(self._opening) + len(self._block.text)

    def feed(self, text: str) -> list[ParserEvent]:
        """Take a piece of text, and return what is certain by now."""
        if self.has_ended:
            return []
        events: list[ParserEvent] = []
        while text:
            if self._block is None:
                text = self._scan(text, events)
            if self._block is not None:
                events += self._block.feed(text)
                text = self._reject(self._block, events)
        return events

    def finish(self, *, whole: bool = True) -> list[ParserEvent]:
        """End the text. whole: the model itself ended it; if not, a call that is open stays so, and half a block is dropped."""
        events: list[ParserEvent] = []
        while self._block is not None and whole:
            was_done = self._block.is_done
            events += self._block.finish()
            self.was_repaired = self._block.is_done and not was_done
            rest = self._reject(self._block, events)
            if self._block is not None:
                return events
            events += self.feed(rest)
        if self._block is None and self._held:
            if whole or DSML not in self._held:  # nothing but a tag has this token: a reply that is cut there was about to call
                events.append(self._held)
            self._held = ""
        return events

    def _scan(self, text: str, events: list[ParserEvent]) -> str:
        """Look for a block; return the text behind its opening tag, if there is one."""
        text = self._held + text
        opening = BLOCK.search(text)
        held = opening or BLOCK_BEGUN.search(text)
        outside = text[: held.start() if held else len(text)].rstrip()
        if outside:
            events.append(outside)
        if opening is None:
            self._held = text[len(outside) :]
            return ""
        self._held, self._opening = "", text[len(outside) : opening.end()]
        markup = next(spelling for spelling in SPELLINGS if spelling.block == opening.group())
        self._block = BlockParser(markup, self._new_id, parallel=self._parallel)
        return text[opening.end() :]

    def _reject(self, block: BlockParser, events: list[ParserEvent]) -> str:
        """Give up a block that broke before its first call; return the text behind its opening tag, which is still to be read."""
        if block.error is None or block.n_started:
            return ""
        self._block = None
        events += [Rejected(block.error), self._opening]
        return block.text
