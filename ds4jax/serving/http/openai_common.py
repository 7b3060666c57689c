"""What chat and text completions of OpenAI's API have in common. No I/O."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ds4jax.serving.http import sse
from ds4jax.serving.http.choice import Ending
from ds4jax.serving.http.generation import Generation, Piece
from ds4jax.serving.http.logprobs import Scored
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


@dataclass(slots=True)
class Answer:
    """One choice of a whole reply. scored: its log probabilities, where they were asked for."""

    reasoning: str = ""
    content: str = ""
    scored: list[Scored] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, piece: Piece) -> None:
        """Take what a piece adds."""
        for delta in piece.deltas:
            if delta.kind == "reasoning":
                self.reasoning += delta.text
            else:
                self.content += delta.text
        self.scored += piece.scored
        self.ending = piece.ending

    @property
    def finish(self) -> dict[str, Any]:
        """Word why it ended, and the error if that is why."""
        assert self.ending is not None
        error = ending_error(self.ending) if self.ending.reason == "error" else {}
        return {"finish_reason": self.ending.reason, **error}


async def collect(generation: Generation, check_s: float) -> list[Answer]:
    """Wait for the whole reply.

    check_s: how often to look, in silence, whether the engine is still alive.
    """
    loop = asyncio.get_running_loop()
    answers = [Answer() for _ in generation.choices]
    while not generation.ended:
        for piece in await generation.pieces(until=loop.time() + check_s):
            if piece.restarts:
                answers[piece.index] = Answer()
            answers[piece.index].add(piece)
    return answers


class ChunkLogprobs:
    """Log probabilities that wait for the next chunk of their choice: not every piece of a reply becomes one."""

    def __init__(self, generation: Generation) -> None:
        self._waiting: list[list[Scored]] = [[] for _ in generation.choices]

    def add(self, piece: Piece) -> None:
        """Keep what came with a piece."""
        self._waiting[piece.index] += piece.scored

    def take(self, index: int) -> list[Scored]:
        """Return what the next chunk carries."""
        scored, self._waiting[index] = self._waiting[index], []
        return scored


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
