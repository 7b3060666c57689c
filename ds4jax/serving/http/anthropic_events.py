"""How a reply of `/v1/messages` is told: content blocks that open, grow and close one after the other. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds4jax.errors import ContextLengthError
from ds4jax.serving.http import sse
from ds4jax.serving.http.anthropic_blocks import Block, TextBlock, ThinkingBlock, ToolUseBlock
from ds4jax.serving.http.call import GenerationFailedError
from ds4jax.serving.http.choice import Ending
from ds4jax.serving.http.generation import Generation, Piece
from ds4jax.serving.http.problems import Problem
from ds4jax.serving.http.reply_events import ReplyEvent
from ds4jax.text.dsml import ArgumentsDelta, CallEnd, CallEvent, CallStart
from ds4jax.text.stream import Delta

PING = sse.encode({"type": "ping"}, event="ping")

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error_object(problem: Problem) -> dict[str, Any]:
    """Shape an error as Anthropic's API does."""
    kind = "api_error" if problem.status >= 500 else ERROR_TYPES.get(problem.status, "invalid_request_error")
    message = problem.message if problem.overflow is None else f"{_overflow(problem.overflow)}. {problem.message}"
    return {"type": "error", "error": {"type": kind, "message": message, **problem.extra}}


class MessageEvents:
    """The events of one reply, and the reply itself as far as it has come."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._choice = generation.choices[0]
        self._has_begun = False
        self._ended: list[Block] = []
        self._block: Block | None = None

    def advance(self, pieces: Sequence[Piece]) -> list[ReplyEvent]:
        """Word what has happened. The message opens when its call leaves the queue: then the counts that it starts with are true."""
        events: list[ReplyEvent] = []
        if not self._has_begun and self._generation.started:
            self._has_begun = True
            events.append({"type": "message_start", "message": self._message({**self._input_usage(), "output_tokens": 0})})
        for piece in pieces:
            if piece.restarts:
                self._ended, self._block = [], None
            for delta in piece.deltas:
                events += self._take(delta)
            for call in piece.calls:
                events += self._take_call(call)
            if piece.ending is not None:
                events += self._end(piece.ending)
        return events

    def silence(self) -> bytes:
        """A ping, once the message has begun: clients expect none before."""
        return PING if self._has_begun else sse.KEEPALIVE

    def message(self) -> dict[str, Any]:
        """The whole reply, once it has ended. Raises GenerationFailedError if it ended with an error."""
        ending = self._choice.ending
        assert ending is not None
        if ending.reason == "error":
            raise GenerationFailedError(ending.error or "generation failed")
        return {**self._message(self._usage()), "content": self._content(), **_stop(ending)}

    def _take(self, delta: Delta) -> list[ReplyEvent]:
        kind = "thinking" if delta.kind == "reasoning" else "text"
        events: list[ReplyEvent] = []
        if self._block is None or self._block.kind != kind:
            events += self._open(ThinkingBlock(self._generation.call.id) if kind == "thinking" else TextBlock())
        return [*events, self._add(delta.text)]

    def _take_call(self, event: CallEvent) -> list[ReplyEvent]:
        match event:
            case CallStart():
                return self._open(ToolUseBlock(event.id, event.name))
            case ArgumentsDelta():
                return [self._add(event.text)]
            case CallEnd():
                assert self._block is not None
                self._block.is_whole = True
                return self._close()

    def _open(self, block: Block) -> list[ReplyEvent]:
        events = self._close()
        self._block = block
        return [*events, {"type": "content_block_start", "index": len(self._ended), "content_block": block.start()}]

    def _add(self, text: str) -> ReplyEvent:
        assert self._block is not None
        return self._delta(self._block.add(text))

    def _close(self) -> list[ReplyEvent]:
        if self._block is None:
            return []
        events = [self._delta(delta) for delta in self._block.last_deltas()]
        events.append({"type": "content_block_stop", "index": len(self._ended)})
        self._ended.append(self._block)
        self._block = None
        return events

    def _delta(self, delta: dict[str, Any]) -> ReplyEvent:
        return {"type": "content_block_delta", "index": len(self._ended), "delta": delta}

    def _end(self, ending: Ending) -> list[ReplyEvent]:
        if ending.reason == "error":
            # Nothing may follow an error but the end, which clients that overlook errors wait for.
            return [error_object(Problem(500, ending.error or "generation failed")), {"type": "message_stop"}]
        events = self._close()
        if all(block["type"] == "thinking" for block in self._content()):  # a message without an answer has an empty one
            events += [*self._open(TextBlock()), *self._close()]
        return [*events, {"type": "message_delta", "delta": _stop(ending), "usage": self._usage()}, {"type": "message_stop"}]

    def _content(self) -> list[dict[str, Any]]:
        """Write the blocks that are whole. A stream has told a call that was cut, but without the end of its arguments."""
        return [block.render() for block in self._ended if block.is_whole]

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._generation.call.id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _input_usage(self) -> dict[str, Any]:
        """Count the tokens of the prompt; those that were found in a slot are not among the input tokens."""
        n_cached = self._choice.n_cached
        return {
            "input_tokens": self._choice.n_prompt - n_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached,
        }

    def _usage(self) -> dict[str, Any]:
        choice = self._choice
        details = {"thinking_tokens": choice.n_reasoning}
        return {**self._input_usage(), "output_tokens": choice.n_generated, "output_tokens_details": details}


def _overflow(error: ContextLengthError) -> str:
    """Say it in the words by which clients of this API know that they must shorten the conversation, or ask for a shorter answer."""
    if error.n_prompt >= error.n_ctx:
        return f"prompt is too long: {error.n_prompt} tokens > {error.n_ctx - 1} maximum"  # one position is for the answer
    sizes = f"{error.n_prompt} + {error.n_completion} > {error.n_ctx}"
    return f"input length and `max_tokens` exceed context limit: {sizes}, decrease input length or `max_tokens` and try again"


def _stop(ending: Ending) -> dict[str, Any]:
    if ending.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop_string}
    return {"stop_reason": _STOP_REASONS[ending.reason], "stop_sequence": None}
