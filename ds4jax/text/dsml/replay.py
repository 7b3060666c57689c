"""What the model wrote when it called tools, to be shown to it again byte for byte."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ds4jax.text.dsml.calls import ToolCall
from ds4jax.text.dsml.markup import BLOCK

MOST_CALLS = 100_000
MOST_CHARACTERS = 128 << 20
"""Python keeps a text with wide characters, as every full mark is, in two to four bytes each: 512 MiB at most."""


_MOST_ALIKE = 4  # turns that wrote the very same block and are found by its text


@dataclass(frozen=True, slots=True)
class _Turn:
    text: str
    calls: tuple[ToolCall, ...]


class ReplayMemory:
    """Remember blocks of calls by the ids of their calls; those that nobody asked for longest go first.

    A client sends calls back as JSON, from which the very text cannot be had: white space, escapes and the spelling of tags are
    lost. Shown other text than it wrote, the model would start from a cache that no longer fits.

    `remember` belongs to one thread; `recall` may run on others, beside it.

    Args:
        most_calls: ids to keep; 0 keeps none.
        most_characters: text to keep.
    """

    def __init__(self, most_calls: int = MOST_CALLS, most_characters: int = MOST_CHARACTERS) -> None:
        self._most_calls, self._most_characters = most_calls, most_characters
        self._turns: OrderedDict[str, _Turn] = OrderedDict()  # by the id of their first call
        self._by_block: dict[int, tuple[str, ...]] = {}  # hashes, for the texts are long; the same block may come again
        self._n_calls = self._n_characters = 0

    def remember(self, text: str, calls: Sequence[ToolCall]) -> None:
        """Keep the text of a block, and the calls that were read from it."""
        if not calls or calls[0].id in self._turns:
            return
        self._turns[calls[0].id] = _Turn(text, tuple(calls))
        self._n_calls += len(calls)
        self._n_characters += len(text)
        block = hash(text.lstrip())
        self._by_block[block] = (*self._by_block.get(block, ())[1 - _MOST_ALIKE :], calls[0].id)
        while self._n_calls > self._most_calls or self._n_characters > self._most_characters:
            _, forgotten = self._turns.popitem(last=False)
            self._n_calls -= len(forgotten.calls)
            self._n_characters -= len(forgotten.text)
            block = hash(forgotten.text.lstrip())
            left = tuple(call_id for call_id in self._by_block.pop(block, ()) if call_id != forgotten.calls[0].id)
            if left:
                self._by_block[block] = left

    def dump(self, text: str) -> bytes:
        """Return what is remembered of the blocks that stand in a text, for `load`; b"" if nothing is. Any thread may ask."""
        blocks = {block: None for start in BLOCK.finditer(text) if (block := _block_at(text, start))}
        turns = [turn for block in blocks for turn in self._turns_of(block)]
        return msgspec.msgpack.encode(turns) if turns else b""

    def load(self, saved: bytes) -> None:
        """Remember what another memory has dumped. What makes no sense is left out."""
        try:
            turns = msgspec.msgpack.decode(saved, type=list[_Turn])
        except (msgspec.MsgspecError, ValueError):
            return
        for turn in turns:
            self.remember(turn.text, turn.calls)

    def _turns_of(self, block: str) -> list[_Turn]:
        """Find the latest turns that were this block; the white space before it may differ."""
        turns = [self._turns.get(call_id) for call_id in self._by_block.get(hash(block), ())]
        return [turn for turn in turns if turn is not None and turn.text.lstrip() == block]

    def recall(self, calls: Sequence[ToolCall]) -> str | None:
        """Find the text in which exactly these calls were made; None if they are unknown, or have been changed since."""
        turn = self._turns.get(calls[0].id) if calls else None
        if turn is None or not _same(turn.calls, calls):
            return None
        try:
            self._turns.move_to_end(calls[0].id)
        except KeyError:  # forgotten in this moment
            pass
        return turn.text


def _block_at(text: str, start: re.Match[str]) -> str | None:
    """Cut a block from a text by its first tag; None where its end is missing."""
    end_tag = "</" + start.group()[1:]
    end = text.find(end_tag, start.end())
    return None if end < 0 else text[start.start() : end + len(end_tag)]


def _same(ours: Sequence[ToolCall], theirs: Sequence[ToolCall]) -> bool:
    """Compare calls; JSON may be written differently."""
    if [(call.id, call.name) for call in ours] != [(call.id, call.name) for call in theirs]:
        return False
    return all(a.arguments == b.arguments or _parsed(a) == _parsed(b) for a, b in zip(ours, theirs, strict=True))


def _parsed(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
