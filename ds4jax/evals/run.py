"""Ask an engine many questions at once, and read the replies as the server does."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

from ds4jax.errors import DecodeFailedError
from ds4jax.serving.engine.api import EngineClient, Event, Finish, FinishReason, GenerateRequest, SamplingParams, Token
from ds4jax.text import Message, TextStream, Tokenizer, opens_reasoning, render, stop_ids, to_ids
from ds4jax.text.dsml import CallCollector, DsmlParser, Tool, ToolCall


@dataclass(frozen=True)
class Question:
    """What is asked. sampling: how the reply is drawn; max_tokens: where it is cut."""

    messages: tuple[Message, ...]
    sampling: SamplingParams
    max_tokens: int
    thinking: bool = False
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What came back. closed: the reasoning, if there was any, has ended; stopped: the model itself ended the reply."""

    tokens: tuple[int, ...]
    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    closed: bool
    stopped: bool


def ask(engine: EngineClient, tokenizer: Tokenizer, questions: Sequence[Question], at_once: int) -> list[Reply]:
    """Ask all questions, at most `at_once` at a time, and return the replies in order.

    Raises what `EngineClient.submit` raises, and DecodeFailedError where a step fails.
    """
    events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
    tokens: list[list[int]] = [[] for _ in questions]
    replies: dict[int, Reply] = {}
    n_sent = 0
    while len(replies) < len(questions):
        while n_sent < len(questions) and n_sent - len(replies) < at_once:
            _submit(engine, tokenizer, questions[n_sent], n_sent, events)
            n_sent += 1
        i, event = events.get()
        if isinstance(event, Token):
            tokens[i].append(event.token)
        elif isinstance(event, Finish):
            if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                raise DecodeFailedError(event.error or "the engine gave no cause")
            replies[i] = _read(tokenizer, questions[i], tokens[i], stopped=event.reason is FinishReason.STOP)
    return [replies[i] for i in range(len(questions))]


def _submit(engine: EngineClient, tokenizer: Tokenizer, question: Question, i: int, events: queue.SimpleQueue[tuple[int, Event]]) -> None:
    prompt = to_ids(render(question.messages, thinking=question.thinking, tools=question.tools), tokenizer)
    stops = stop_ids(tokenizer, thinking=question.thinking)
    engine.submit(GenerateRequest(tuple(prompt), question.max_tokens, question.sampling, stops), lambda event: events.put((i, event)))


def _read(tokenizer: Tokenizer, question: Question, tokens: Sequence[int], *, stopped: bool) -> Reply:
    numbers = iter(range(len(tokens) + 1))
    parser = DsmlParser(lambda: f"call_{next(numbers)}") if question.tools else None
    thinking = opens_reasoning(render(question.messages, thinking=question.thinking, tools=question.tools))
    stream = TextStream(thinking=thinking, tools=parser)
    deltas = [delta for token in tokens for delta in stream.feed(tokenizer.token_bytes(token))] + stream.finish(whole=stopped)
    calls = CallCollector()
    calls.take(stream.take_calls())
    text = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content")}
    return Reply(tuple(tokens), text["reasoning"], text["content"], tuple(calls.calls), not stream.in_reasoning, stopped)
