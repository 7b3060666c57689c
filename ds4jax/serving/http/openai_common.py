"""What chat and text completions of OpenAI's API have in common. No I/O."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from ds4jax.serving.http import sse
from ds4jax.serving.http.choice import Ending
from ds4jax.serving.http.generation import Generation, Piece
from ds4jax.serving.http.problems import SERVER, Problem


def error_object(problem: Problem) -> dict[str, Any]:
    """Shape an error as OpenAI's API does."""
    return {"error": {"message": problem.message, "type": problem.type, "param": problem.param, "code": problem.code, **problem.extra}}


def ending_error(ending: Ending) -> dict[str, Any]:
    """Shape the error that ended a choice."""
    return error_object(Problem(500, ending.error or "generation failed", SERVER, code="generation_failed"))


def head(generation: Generation, kind: str) -> dict[str, Any]:
    """Begin a reply or a chunk."""
    return {"id": generation.call.id, "object": kind, "created": int(time.time()), "model": generation.call.model}


def usage(generation: Generation) -> dict[str, Any]:
    """Count tokens over all choices; those of the reasoning are completion tokens too."""
    n_prompt, n_cached, n_generated = generation.totals()
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": n_prompt - n_cached},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.n_reasoning for choice in generation.choices)},
    }


async def collect(generation: Generation, check_s: float) -> list[tuple[dict[str, str], Ending]]:
    """Wait for the whole reply: for each choice its text by kind ("reasoning", "content"), and its ending.

    check_s: how often to look, in silence, whether the engine is still alive.
    """
    loop = asyncio.get_running_loop()
    texts: list[dict[str, str]] = [{"reasoning": "", "content": ""} for _ in generation.choices]
    while not generation.ended:
        for piece in await generation.pieces(until=loop.time() + check_s):
            if piece.restarts:
                texts[piece.index] = {"reasoning": "", "content": ""}
            for delta in piece.deltas:
                texts[piece.index][delta.kind] += delta.text
    return [(text, choice.ending) for text, choice in zip(texts, generation.choices, strict=True) if choice.ending is not None]


class Chunks(Protocol):
    """How one endpoint words the chunks of its stream."""

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """Word what a piece adds; its ending last, errors left out."""
        ...

    def usage(self) -> dict[str, Any]:
        """Word the chunk that carries the usage."""
        ...


async def stream_body(generation: Generation, chunks: Chunks, keepalive_s: float) -> AsyncIterator[bytes]:
    """Yield the event stream of a generation, with comments while it is silent, up to and with `[DONE]`."""
    done = False

    async def next_frames(until: float) -> bytes | None:
        nonlocal done
        if done:
            return None
        frames: list[bytes] = []
        for piece in await generation.pieces(until):
            frames += map(sse.encode, chunks.piece(piece))
            if piece.ending is not None and piece.ending.reason == "error":
                frames.append(sse.encode(ending_error(piece.ending), event="error"))
        if generation.ended:
            done = True
            if generation.call.include_usage:
                frames.append(sse.encode(chunks.usage()))
            frames.append(sse.DONE)
        return b"".join(frames)

    async for frame in sse.with_keepalive(next_frames, keepalive_s):
        yield frame
