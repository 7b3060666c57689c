"""Server-sent events: encoding, and a body that speaks up when nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from quart import Response

KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def encode(data: Any, event: str | None = None) -> bytes:
    """Encode one event; `data` is anything orjson takes."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


async def with_keepalive(
    next_frames: Callable[[float], Awaitable[bytes | None]], keepalive_s: float, silence: Callable[[], bytes] = lambda: KEEPALIVE
) -> AsyncIterator[bytes]:
    """Yield the frames, and what `silence` says (a comment) after every `keepalive_s` seconds without any.

    next_frames(until) waits for work until the loop's clock shows `until`, and returns encoded events, b"" if there are
    none to send, or None at the end. Silence counts from the last write, not from the last engine event: prefill
    progress or a held-back stop string produce events and no bytes, and proxies drop connections that carry no bytes.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + keepalive_s
    while (frames := await next_frames(deadline)) is not None:
        if not frames and loop.time() >= deadline:
            frames = silence()
        if frames:
            yield frames
            deadline = loop.time() + keepalive_s


def response(body: AsyncIterator[bytes]) -> Response:
    """Wrap a body as an event stream that no timeout ends and no proxy buffers."""
    reply = Response(
        body, content_type="text/event-stream; charset=utf-8", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    reply.timeout = None
    return reply
