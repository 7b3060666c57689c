"""How a reply of `/v1/responses` is told: numbered events around the items of its output. No I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from ds4jax.serving.http import sse
from ds4jax.serving.http.choice import Ending
from ds4jax.serving.http.generation import Generation, Piece
from ds4jax.serving.http.logprobs import Scored
from ds4jax.serving.http.reply_events import ReplyEvent
from ds4jax.serving.http.responses_body import ResponseCall
from ds4jax.serving.http.responses_calls import call_item
from ds4jax.serving.http.responses_items import ItemEvent, ItemStatus, MessageItem, OutputItem, ReasoningItem
from ds4jax.serving.http.responses_store import StoredResponse
from ds4jax.text.chat import Message
from ds4jax.text.dsml import ArgumentsDelta, CallEnd, CallEvent, CallStart
from ds4jax.text.stream import Delta

Keep = Callable[[ResponseCall, StoredResponse], None]


class ResponseEvents:
    """The events of one reply, and the response itself as far as it has come.

    keep: takes the response once it has ended well.
    """

    def __init__(self, generation: Generation, call: ResponseCall, keep: Keep) -> None:
        self._generation, self._call, self._keep = generation, call, keep
        self._created_at = int(time.time())
        self._n_events = 0
        self._output: list[dict[str, Any]] = []  # items that are finished
        self._item: OutputItem | None = None
        self._scored: list[Scored] = []  # of the answer, and not with its item yet
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._end: dict[str, Any] = {"status": "in_progress"}

    def advance(self, pieces: Sequence[Piece]) -> list[ReplyEvent]:
        """Word what has happened."""
        events: list[ReplyEvent] = []
        if self._n_events == 0:
            events += [self._event(f"response.{name}", {"response": self.response()}) for name in ("created", "in_progress")]
        for piece in pieces:
            if piece.restarts:
                self._output, self._item, self._scored, self._texts = [], None, [], {"reasoning": [], "content": []}
            self._scored += [token for token in piece.scored if token.is_content]
            for delta in piece.deltas:
                events += self._number(self._take(delta))
            for call in piece.calls:
                events += self._number(self._take_call(call))
            if piece.ending is not None:
                events += self._number(self._finish(piece.ending))
        return events

    def silence(self) -> bytes:
        """A comment: this API has no event that means nothing."""
        return sse.KEEPALIVE

    def response(self) -> dict[str, Any]:
        """Write the response as it stands."""
        has_ended = self._end["status"] != "in_progress"
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self._call.model,
            "output": list(self._output),
            **self._call.echo,
            "usage": self._usage() if has_ended else None,
            **self._end,
        }

    def _take(self, delta: Delta) -> Iterable[ItemEvent]:
        self._texts[delta.kind].append(delta.text)
        if delta.kind == "reasoning" and not self._call.has_reasoning_item:
            return
        kind = "reasoning" if delta.kind == "reasoning" else "message"
        if self._item is None or self._item.kind != kind:
            yield from self._open(self._reasoning_item if kind == "reasoning" else MessageItem)
        assert self._item is not None
        self._score()
        yield from self._item.add(delta.text)

    def _take_call(self, event: CallEvent) -> Iterable[ItemEvent]:
        match event:
            case CallStart():
                yield from self._open(lambda index: call_item(index, event, self._call.forms.get(event.name)))
            case ArgumentsDelta():
                assert self._item is not None
                yield from self._item.add(event.text)
            case CallEnd():
                yield from self._close("completed")

    def _open(self, make: Callable[[int], OutputItem]) -> Iterable[ItemEvent]:
        yield from self._close("completed")
        self._item = make(len(self._output))
        yield from self._item.opening()

    def _close(self, status: ItemStatus) -> Iterable[ItemEvent]:
        if self._item is not None:
            self._score()
            yield from self._item.closing(status)
            self._output.append(self._item.render(status))
            self._item = None

    def _reasoning_item(self, output_index: int) -> OutputItem:
        return ReasoningItem(output_index, is_shown=self._call.shows_reasoning, is_sealed=self._call.seals_reasoning)

    def _score(self) -> None:
        """Give log probabilities to the item that they belong to."""
        if isinstance(self._item, MessageItem):
            self._item.score(self._scored)
            self._scored = []

    def _finish(self, ending: Ending) -> Iterable[ItemEvent]:
        # Thoughts or a call that a stop string broke off are not complete, even though the response is.
        is_broken = self._item is not None and self._item.kind != "message" and ending.stop_string is not None
        yield from self._close("completed" if ending.reason == "stop" and not is_broken else "incomplete")
        if ending.reason == "stop" and not any(item["type"] == "message" for item in self._output):
            yield from self._open(MessageItem)  # the answer was empty
            yield from self._close("completed")
        match ending.reason:
            case "error":
                self._end = {"status": "failed", "error": {"code": "server_error", "message": ending.error or "generation failed"}}
            case "length":
                self._end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            case _:
                self._end = {"status": "completed", "completed_at": int(time.time())}
        response = self.response()
        if ending.reason != "error":
            (choice,) = self._generation.choices
            content, reasoning = ("".join(self._texts[kind]) for kind in ("content", "reasoning"))
            answer = Message("assistant", content, reasoning=reasoning or None, tool_calls=tuple(choice.calls))
            self._keep(self._call, StoredResponse(orjson.dumps(response), (*self._call.messages, answer), self._call.forms))
        yield f"response.{self._end['status']}", {"response": response}

    def _number(self, events: Iterable[ItemEvent]) -> list[ReplyEvent]:
        return [self._event(kind, members) for kind, members in events]

    def _event(self, kind: str, members: dict[str, Any]) -> ReplyEvent:
        event = {"type": kind, "sequence_number": self._n_events, **members}
        self._n_events += 1
        return event

    def _usage(self) -> dict[str, Any]:
        (choice,) = self._generation.choices
        n_prompt, n_cached, n_generated = choice.n_prompt, choice.n_cached, choice.n_generated
        return {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": n_prompt - n_cached},
            "output_tokens": n_generated,
            "output_tokens_details": {"reasoning_tokens": choice.n_reasoning},
            "total_tokens": n_prompt + n_generated,
        }
