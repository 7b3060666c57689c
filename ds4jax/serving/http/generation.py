"""A running API call: engine events in, pieces of the reply out, one log line and one set of counts at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from ds4jax.errors import Ds4jaxError, EngineStoppedError
from ds4jax.serving.engine.api import EngineClient
from ds4jax.serving.http.call import Call
from ds4jax.serving.http.choice import SHUTTING_DOWN, Choice, Ending
from ds4jax.serving.http.logprobs import Scored
from ds4jax.serving.http.service import EventStream, Postbox
from ds4jax.serving.http.timeline import Timeline
from ds4jax.serving.http.trace import CallTrace
from ds4jax.serving.metrics import DISCONNECTED, ChoiceReport, Metrics
from ds4jax.text.dsml import CallEvent, ReplayMemory
from ds4jax.text.stream import Delta
from ds4jax.text.tokenizer import Tokenizer

log = logging.getLogger("ds4jax.http")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine event adds to one choice of the reply: text, then calls, then its ending.

    scored: log probabilities of the tokens whose text is settled with it, where the call wants them.
    restarts: the choice begins anew, and all that was said of it is void; only calls with `retries_calls` have such pieces.
    """

    index: int
    deltas: list[Delta]
    ending: Ending | None = None
    calls: list[CallEvent] = field(default_factory=list)
    restarts: bool = False
    scored: list[Scored] = field(default_factory=list)


class Generation:
    """One API call at work. Whoever makes one sees to it that `close` is called, whatever happens to the client."""

    def __init__(
        self,
        call: Call,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: Metrics,
        memory: ReplayMemory,
        postbox: Postbox,
        trace: CallTrace | None = None,
    ) -> None:
        """Submit the call on the running loop, which is the postbox's. Raises what EngineClient.submit raises."""
        self.call = call
        self.choices = [Choice(tokenizer, call, index) for index in range(len(call.requests))]
        self._n_ctx, self._metrics, self._memory, self._trace = engine.n_ctx, metrics, memory, trace
        self._times = Timeline(len(self.choices), postbox.loop.time, metrics.token_followed)
        self._reported = False
        self._events = EventStream(engine, call.requests, postbox, "n" if call.n > 1 else "prompt", self._times.arrived)

    @property
    def started(self) -> bool:
        """Whether the call has left the queue, so that the counts of its prompt are known."""
        return self._times.started

    @property
    def ended(self) -> bool:
        """Whether every choice has its ending."""
        return all(choice.ending is not None for choice in self.choices)

    async def pieces(self, until: float) -> list[Piece]:
        """Wait for news, at most until the loop's clock shows `until` (seconds).

        A stop string ends its choice here and cancels the rest in the engine, and so does the end of its calls. If the engine dies,
        every open choice ends with an error.
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
            if self._trace is not None:
                self._trace.took(index, event)
            deltas, calls = choice.take(event)
            if choice.ending is not None:
                self._events.cancel(index)
                choice.remember_calls(self._memory)
            if deltas or calls or choice.ending is not None:
                pieces.append(Piece(index, deltas, choice.ending, calls, scored=choice.take_scored()))
        if self.call.retries_calls:
            pieces = self._retry_calls(pieces)
        if self.call.n > 1 and (failure := self._failure(pieces)) is not None:  # answers to one question stand and fall together
            pieces += self._fail_open_choices(failure)
        if self._trace is not None:
            for piece in pieces:
                self._trace.told(piece.index, piece.deltas)
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

    def _retry_calls(self, pieces: list[Piece]) -> list[Piece]:
        """Start choices anew that have just ended with calls which cannot be read."""
        for piece in pieces.copy():
            choice = self.choices[piece.index]
            again = choice.second_try(self._n_ctx) if piece.ending is not None else None
            if again is None:
                continue
            try:
                self._events.restart(piece.index, again)
            except Ds4jaxError as error:  # a full queue, say: what we have is the reply
                log.info("%s a call that cannot be read is not tried again: %s", self.call.id, error)
                continue
            choice.restart()
            if self._trace is not None:
                self._trace.restarted(piece.index, again)
            pieces = [*(other for other in pieces if other.index != piece.index), Piece(piece.index, [], restarts=True)]
        return pieces

    @staticmethod
    def _failure(pieces: list[Piece]) -> str | None:
        return next((p.ending.error for p in pieces if p.ending is not None and p.ending.reason == "error"), None)

    def _fail_open_choices(self, error: str) -> list[Piece]:
        open_choices = [(i, choice) for i, choice in enumerate(self.choices) if choice.ending is None]
        for i, choice in open_choices:
            choice.fail(error)
            self._events.cancel(i)
        self._report()
        return [Piece(i, [], choice.ending) for i, choice in open_choices]

    def _report(self) -> None:
        """Log one line and count, once. Never any text of the prompt or the reply."""
        if self._reported:
            return
        self._reported = True
        n_prompt, n_cached, n_generated = self.totals()
        reports = [self._choice_report(i, choice) for i, choice in enumerate(self.choices)]
        self._metrics.call_ended(self.call.endpoint, reports)
        if self._trace is not None:
            errors = [choice.ending.error if choice.ending else None for choice in self.choices]
            self._trace.end(reports, errors, [list(choice.calls) for choice in self.choices])
        finishes = ",".join(report.finish for report in reports)
        queue_s, ttft_s = _seconds(report.queue_s for report in reports), _seconds(report.ttft_s for report in reports)
        log.info(
            "%s endpoint=%s stream=%d prompt=%d cached=%d completion=%d finish=%s queue_s=%s ttft_s=%s total_s=%.3f",
            self.call.id, self.call.endpoint, self.call.stream, n_prompt, n_cached, n_generated, finishes,
            queue_s, ttft_s, self._times.elapsed_s,
        )  # fmt: skip

    def _choice_report(self, index: int, choice: Choice) -> ChoiceReport:
        times = self._times
        return ChoiceReport(
            finish=choice.ending.reason if choice.ending else DISCONNECTED,
            queue_s=times.queue_s(index),
            ttft_s=times.ttft_s(index),
            total_s=times.total_s(index) if choice.ending else times.elapsed_s,
            is_repaired=choice.is_repaired,
            is_retried=choice.has_restarted,
            is_unreadable=choice.unreadable is not None,
        )

    def totals(self) -> tuple[int, int, int]:
        """Tokens of the prompts, of those cached, and generated over all choices; a prompt counts once, however many choices it has."""
        firsts = self.choices[:: self.call.n]
        return (
            sum(choice.n_prompt for choice in firsts),
            sum(choice.n_cached for choice in firsts),
            sum(choice.n_generated for choice in self.choices),
        )


def _seconds(of_choices: Iterable[float | None]) -> str:
    """Write the time of the choice that got there first."""
    first = min((value for value in of_choices if value is not None), default=None)
    return "-" if first is None else f"{first:.3f}"
