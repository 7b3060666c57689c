"""Thoughts that clients of `/v1/responses` did not ask to see, for when they send the conversation back. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

from ds4jax.text.chat import Message

MOST_CHARACTERS = 64 << 20


class HiddenThoughts:
    """Remember what the model thought, by all that its client knows of the conversation; what nobody asked for longest goes first.

    Between calls of tools the model has to read its own thoughts, and only with them does the cache of a slot fit. A client that
    keeps the conversation itself, and was not shown them, cannot send them.

    `remember` belongs to one thread; `recall` may run on others, beside it.
    """

    def __init__(self, most_characters: int = MOST_CHARACTERS) -> None:
        self._most_characters = most_characters
        self._thoughts: OrderedDict[bytes, str] = OrderedDict()
        self._n_characters = 0

    def remember(self, instructions: str | None, messages: Sequence[Message]) -> None:
        """Keep what the model thought before the last of these messages, which is its own."""
        thoughts = messages[-1].reasoning
        if not thoughts:
            return
        *_, key = _keys(instructions, messages)
        self._n_characters += len(thoughts) - len(self._thoughts.pop(key, ""))
        self._thoughts[key] = thoughts
        while self._n_characters > self._most_characters:
            _, forgotten = self._thoughts.popitem(last=False)
            self._n_characters -= len(forgotten)

    def recall(self, instructions: str | None, messages: Sequence[Message]) -> list[Message]:
        """Give the model's messages their thoughts, where they have none and followed what they follow here."""
        return [
            replace(message, reasoning=self._recall(key)) if message.role == "assistant" and message.reasoning is None else message
            for message, key in zip(messages, _keys(instructions, messages), strict=True)
        ]

    def _recall(self, key: bytes) -> str | None:
        thoughts = self._thoughts.get(key)
        if thoughts is not None:
            try:
                self._thoughts.move_to_end(key)
            except KeyError:  # forgotten in this moment
                pass
        return thoughts


def _keys(instructions: str | None, messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield for each message a digest of the conversation up to and with it.

    Thoughts may repeat anything that the model has read, so only who knows all of that may have it read them again.
    """
    seen = blake2b((instructions or "").encode(), digest_size=16)
    for message in messages:
        # The id of a call is as good as the call, and is not written in several ways.
        for text in (message.role, message.content, message.tool_call_id or "", *(call.id for call in message.tool_calls), "."):
            data = text.encode()
            seen.update(len(data).to_bytes(8, "little") + data)
        yield seen.digest()
