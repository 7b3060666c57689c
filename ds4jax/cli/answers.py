"""One request to an engine in the same process, as a stream of text."""

from __future__ import annotations

import queue
from collections.abc import Generator, Sequence

from ds4jax.errors import DecodeFailedError
from ds4jax.serving.engine.api import EngineClient, Event, Finish, FinishReason, GenerateRequest, SamplingParams, Token
from ds4jax.text import Delta, Message, TextStream, Tokenizer, opens_reasoning, render, stop_ids, to_ids


def chat_prompt(messages: Sequence[Message], tokenizer: Tokenizer, *, thinking: bool) -> tuple[list[int], bool]:
    """Encode a conversation; also return whether the answer starts with reasoning."""
    segments = render(messages, thinking=thinking)
    return to_ids(segments, tokenizer), opens_reasoning(segments)


def stream_answer(
    engine: EngineClient,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_tokens: int | None,
    *,
    thinking: bool,
) -> Generator[Delta, None, None]:
    """Yield an answer piece by piece as it is generated. Closing the iterator cancels the request.

    Raises the engine's errors, and DecodeFailedError when a step fails on the way.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request = GenerateRequest(tuple(prompt), max_tokens, sampling, stop_ids(tokenizer, thinking=thinking))
    text = TextStream(thinking=thinking)
    request_id = engine.submit(request, events.put)
    try:
        while not isinstance(event := events.get(), Finish):
            if isinstance(event, Token):
                yield from text.feed(tokenizer.token_bytes(event.token))
        yield from text.finish()
        if event.reason is FinishReason.ERROR:
            raise DecodeFailedError(event.error or "no cause was given")
    finally:
        engine.cancel(request_id)  # of no effect after the Finish
