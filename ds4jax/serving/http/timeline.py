"""When things happened to the choices of a call, by the clock at which their events reached the loop.

Not when a reply took them up: a client that reads slowly would then look like a slow model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds4jax.serving.engine.api import Event, Started, Token


@dataclass(slots=True)
class ChoiceTimes:
    """Moments of one choice, in seconds of the clock; None: not yet. token: the last one, since the choice last began."""

    started: float | None = None
    first: float | None = None
    token: float | None = None
    last: float | None = None


class Timeline:
    """Follows the choices of one call from its submission, which is when this is made.

    Args:
        n: choices.
        clock: seconds that only ever grow.
        on_gap: told the time between two tokens of a choice.
    """

    def __init__(self, n: int, clock: Callable[[], float], on_gap: Callable[[float], None]) -> None:
        self._clock, self._on_gap = clock, on_gap
        self._submitted = clock()
        self._choices = [ChoiceTimes() for _ in range(n)]

    def arrived(self, index: int, event: Event) -> None:
        """Note an event of a choice."""
        now, times = self._clock(), self._choices[index]
        times.last = now
        if isinstance(event, Started):
            times.started = times.started or now
            times.token = None  # a choice that begins anew has not been slow to go on
        elif isinstance(event, Token):
            if times.token is not None:
                self._on_gap(now - times.token)
            times.first = times.first or now
            times.token = now

    @property
    def started(self) -> bool:
        """Whether a choice has left the queue."""
        return any(times.started is not None for times in self._choices)

    def queue_s(self, index: int) -> float | None:
        """Seconds a choice waited for a slot."""
        return self._since(self._choices[index].started)

    def ttft_s(self, index: int) -> float | None:
        """Seconds until its first token."""
        return self._since(self._choices[index].first)

    def total_s(self, index: int) -> float:
        """Seconds until its last event; until now, if it had none."""
        last = self._choices[index].last
        return self.elapsed_s if last is None else last - self._submitted

    @property
    def elapsed_s(self) -> float:
        """Seconds since the submission."""
        return self._clock() - self._submitted

    def _since(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._submitted
