"""Replies that are told as a series of typed events.

One writer words them for a stream; a reply that does not stream is what the same writer has at the end, so the two cannot differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from ds4jax.serving.http import sse
from ds4jax.serving.http.generation import Generation, Piece

ReplyEvent = dict[str, Any]
"""One event; its `type` is also the name that its `event:` line carries."""


class EventWriter(Protocol):
    """How one API tells a reply."""

    def advance(self, pieces: Sequence[Piece]) -> list[ReplyEvent]:
        """Word what has happened since the last call, which may be nothing. The piece that ends the reply brings the last events."""
        ...

    def silence(self) -> bytes:
        """Encode what keeps the connection open while there is nothing to tell."""
        ...


async def stream(generation: Generation, writer: EventWriter, keepalive_s: float) -> AsyncIterator[bytes]:
    """Yield the event stream of a generation; what can be told before any event of the engine goes out at once."""
    is_first, is_done = True, False

    async def next_frames(until: float) -> bytes | None:
        nonlocal is_first, is_done
        if is_done:
            return None
        pieces: list[Piece] = [] if is_first else await generation.pieces(until)
        is_first = False
        events = writer.advance(pieces)
        is_done = generation.ended
        return b"".join(sse.encode(event, event=event["type"]) for event in events)

    async for frame in sse.with_keepalive(next_frames, keepalive_s, writer.silence):
        yield frame


async def complete(generation: Generation, writer: EventWriter, check_s: float) -> None:
    """Run a generation to its end through a writer that then holds the whole reply.

    check_s: how often to look, in silence, whether the engine is still alive.
    """
    loop = asyncio.get_running_loop()
    while not generation.ended:
        writer.advance(await generation.pieces(until=loop.time() + check_s))
