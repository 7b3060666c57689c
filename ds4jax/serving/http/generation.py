"""A running API call: engine events in, pieces of the reply out, one log line and one set of counts at the end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Literal

from ds4jax.errors import EngineStoppedError
from ds4jax.serving.engine.api import EngineClient, Event, Finish, FinishReason, Prefilled, Started, Token
from ds4jax.serving.http.call import Call
from ds4jax.serving.http.service import EventStream
from ds4jax.serving.metrics import Metrics
from ds4jax.text.stream import Delta, TextStream
from ds4jax.text.tokenizer import Tokenizer

log = logging.getLogger("ds4jax.http")

SHUTTING_DOWN = "the server is shutting down; send the request again later"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a choice ended. stop_string: the one that was hit, if any; error: what to tell the client, where reason is "error"."""

    reason: Literal["stop", "length", "error"]
    stop_string: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine event adds to one choice of the reply."""

    index: int
    deltas: list[Delta]
    ending: Ending | None = None


class Choice:
    """One choice of a reply: counts, and the text stream that its tokens feed."""

    def __init__(self, tokenizer: Tokenizer, n_prompt: int, text: TextStream) -> None:
        self._tokenizer, self._text = tokenizer, text
        self.n_prompt, self.n_cached, self.n_generated, self.n_reasoning = n_prompt, 0, 0, 0
        self.ending: Ending | None = None

    def take(self, event: Event) -> list[Delta]:
        """Account for an event; sets `ending` when it is the last that matters."""
        match event:
            case Started():
                self.n_cached = event.n_cached
            case Prefilled():
                pass
            case Token():
                self.n_generated += 1
                self.n_reasoning += self._text.in_reasoning
                deltas = self._text.feed(self._tokenizer.token_bytes(event.token))
                if self._text.stop_hit is not None:
                    self.ending = Ending("stop", stop_string=self._text.stop_hit)
                return deltas
            case Finish():
                deltas = self._text.finish()
                self.ending = self._ending_of(event)
                return deltas
        return []

    def fail(self, error: str) -> None:
        """End the choice with an error that came from outside the engine's events."""
        self.ending = Ending("error", error=error)

    def _ending_of(self, finish: Finish) -> Ending:
        if finish.reason is FinishReason.ERROR:
            return Ending("error", error=finish.error or "generation failed")
        if finish.reason is FinishReason.CANCELLED:  # nobody but a closing server cancels what is still being read
            return Ending("error", error=finish.error or SHUTTING_DOWN)
        if self._text.stop_hit is not None:  # a match that had waited for the end
            return Ending("stop", stop_string=self._text.stop_hit)
        return Ending("stop" if finish.reason is FinishReason.STOP else "length")


class Generation:
    """One API call at work. Whoever makes one sees to it that `close` is called, whatever happens to the client."""

    def __init__(self, call: Call, engine: EngineClient, tokenizer: Tokenizer, metrics: Metrics) -> None:
        """Submit the call on the running loop. Raises what EngineClient.submit raises."""
        self.call = call
        self.choices = [
            Choice(tokenizer, len(request.prompt), TextStream(thinking=call.opens_reasoning, stops=call.stop_strings))
            for request in call.requests
        ]
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._t_submit = self._loop.time()
        self._t_started: float | None = None
        self._t_first: float | None = None
        self._reported = False
        self._events = EventStream(engine, call.requests)

    @property
    def started(self) -> bool:
        """Whether the call has left the queue, so that the counts of its prompt are known."""
        return self._t_started is not None

    @property
    def ended(self) -> bool:
        """Whether every choice has its ending."""
        return all(choice.ending is not None for choice in self.choices)

    async def pieces(self, until: float) -> list[Piece]:
        """Wait for news, at most until the loop's clock shows `until` (seconds).

        A stop string ends its choice here and cancels the rest in the engine. If the engine dies, every open choice ends
        with an error.
        """
        try:
            batch = await self._events.batch(until)
        except EngineStoppedError as error:
            return self._fail_open_choices(str(error))
        pieces = []
        for index, event in batch:
            choice = self.choices[index]
            if choice.ending is not None:
                continue  # sent before the engine saw our cancel
            self._clock(event)
            deltas = choice.take(event)
            if choice.ending is not None:
                self._events.cancel(index)
            if deltas or choice.ending is not None:
                pieces.append(Piece(index, deltas, choice.ending))
        if self.ended:
            self._report()
        return pieces

    def abort(self) -> None:
        """End what still runs because the server closes; the client is told."""
        self._events.abort(SHUTTING_DOWN)

    def close(self) -> None:
        """Cancel what still runs. Closing twice does nothing more."""
        self._events.close()
        self._report()

    def _fail_open_choices(self, error: str) -> list[Piece]:
        open_choices = [(i, choice) for i, choice in enumerate(self.choices) if choice.ending is None]
        for _, choice in open_choices:
            choice.fail(error)
        self._report()
        return [Piece(i, [], choice.ending) for i, choice in open_choices]

    def _clock(self, event: Event) -> None:
        if self._t_started is None and isinstance(event, Started):
            self._t_started = self._loop.time()
        if self._t_first is None and isinstance(event, Token):
            self._t_first = self._loop.time()

    def _report(self) -> None:
        """Log one line and count, once. Never any text of the prompt or the reply."""
        if self._reported:
            return
        self._reported = True
        finishes = [choice.ending.reason if choice.ending else "disconnected" for choice in self.choices]
        n_prompt, n_cached, n_generated = self.totals()
        total_s = self._loop.time() - self._t_submit
        queue_s = None if self._t_started is None else self._t_started - self._t_submit
        ttft_s = None if self._t_first is None else self._t_first - self._t_submit
        self._metrics.request_ended(self.call.endpoint, finishes, ttft_s=ttft_s, total_s=total_s)
        log.info(
            "%s endpoint=%s stream=%d prompt=%d cached=%d completion=%d finish=%s queue_s=%s ttft_s=%s total_s=%s",
            self.call.id, self.call.endpoint, self.call.stream, n_prompt, n_cached, n_generated, ",".join(finishes),
            _seconds(queue_s), _seconds(ttft_s), _seconds(total_s),
        )  # fmt: skip

    def totals(self) -> tuple[int, int, int]:
        """Tokens over all choices: of prompts, of those cached, and generated."""
        return (
            sum(choice.n_prompt for choice in self.choices),
            sum(choice.n_cached for choice in self.choices),
            sum(choice.n_generated for choice in self.choices),
        )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
