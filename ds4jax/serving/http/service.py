"""The bridge between the engine's thread and the asyncio loop: events of one API call as an awaitable stream that can be closed.

Every token of every client passes here, so a step wakes the loop once, a token wakes its reader once, and silence is watched by one
timer a stream that is moved only when it fires.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ds4jax.errors import EngineStoppedError, QueueFullError, RequestError
from ds4jax.serving.engine.api import EngineClient, Event, Finish, FinishReason, GenerateRequest, Sink

IndexedEvent = tuple[int, Event]


class Postbox:
    """Carries events from the engine's thread to one loop. What is posted while the loop has not come yet needs no second ring."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._letters: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._has_rung = False

    def post(self, receive: Callable[[Event], None], event: Event) -> None:
        """Have receive(event) called on the loop. For any thread; never waits."""
        self._letters.append((receive, event))
        if self._has_rung:  # before the loop lets go of it, it has not begun to empty the box
            return
        self._has_rung = True
        try:
            self.loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # the loop is closed: nobody is left to read, and the engine's thread must not pay for it
            self._letters.clear()

    def _empty(self) -> None:
        self._has_rung = False
        while self._letters:
            receive, event = self._letters.popleft()
            receive(event)


class EventStream:
    """Events of one API call, which may be several engine requests (one a choice), merged in order of arrival.

    The engine never waits for us: its thread only drops events into the postbox, and they pile up here while a client reads
    slowly. Closing cancels whatever still runs, each request once, and never one that has finished.
    """

    def __init__(
        self,
        engine: EngineClient,
        requests: Sequence[GenerateRequest],
        postbox: Postbox,
        many: str = "prompt",
        on_arrival: Callable[[int, Event], None] = lambda index, event: None,
    ) -> None:
        """Submit the requests, all or none. Call it on the loop that will read the events, which is the postbox's.

        many: the field by which a client asks for several. on_arrival: told every event when it reaches the loop, whenever it is read.
        Raises what EngineClient.submit raises; requests submitted before the refused one are cancelled. What the queue has no room for is
        refused before any of it takes the place of others' requests. More requests than the server ever holds raise RequestError
        instead of QueueFullError: no retry could succeed.
        """
        self._engine, self._on_arrival = engine, on_arrival
        self._postbox, self._loop = postbox, postbox.loop
        self._reader: asyncio.Future[None] | None = None  # who waits for events
        self._until = 0.0  # how long it waits
        self._alarm: asyncio.TimerHandle | None = None
        self._events: list[IndexedEvent] = []
        self._closed = False
        self._running: dict[int, int] = {}  # choice index -> engine request id
        try:
            for index, request in enumerate(requests):
                n_more = len(requests) - index - 1
                self._running[index] = engine.submit(request, self._sink(index), n_more)
        except QueueFullError as error:
            self.close()
            if error.n_most is not None and len(requests) > error.n_most:
                n_most = error.n_most
                text = f"{many}: {len(requests)} completions in one request, but this server takes at most {n_most} at once; ask for fewer"
                raise RequestError(text, many) from None
            raise
        except BaseException:
            self.close()
            raise

    def _sink(self, index: int) -> Sink:
        """Make what takes the events of a choice on the engine's thread."""
        return partial(self._postbox.post, partial(self._receive, index))

    def _receive(self, index: int, event: Event) -> None:
        """Take an event on the loop."""
        if self._running.get(index) != event.request_id:
            return  # cancelled meanwhile
        if isinstance(event, Finish):
            del self._running[index]
        self._on_arrival(index, event)
        self._events.append((index, event))
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def batch(self, until: float) -> list[IndexedEvent]:
        """Wait for events, at most until the loop's clock shows `until` (seconds); return all that have arrived.

        Everything queued comes at once, so that a reader who fell behind catches up in one write. An empty list means
        silence. Raises CancelledError once the stream is closed, and EngineStoppedError when the engine died and can send nothing any more.
        """
        if not self._events:
            await self._wait(until)
        if self._closed:
            raise asyncio.CancelledError
        if not self._events and not self._engine.alive():
            raise EngineStoppedError("the engine stopped while this request was running; restart the server")
        events, self._events = self._events, []
        return events

    async def _wait(self, until: float) -> None:
        """Wait for an event, for the end of the stream or for the time."""
        if self._closed:
            return
        self._reader, self._until = self._loop.create_future(), until
        if self._alarm is None or self._alarm.when() > until:
            self._set_alarm()
        try:
            await self._reader
        finally:
            self._reader = None

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(self._until, self._alarmed)

    def _alarmed(self) -> None:
        """Wake a reader who has waited long enough. One who has begun to wait again meanwhile waits on: moving the alarm here, and not
        with each token, saves most of them the timer."""
        self._alarm = None
        if self._reader is None:
            return
        if self._loop.time() < self._until:
            self._set_alarm()
        else:
            self._wake()

    def cancel(self, index: int) -> None:
        """Cancel one choice if it still runs; no event of it arrives after this."""
        request_id = self._running.pop(index, None)
        if request_id is not None:
            self._engine.cancel(request_id)

    def restart(self, index: int, request: GenerateRequest) -> None:
        """Let another request take the place of a choice. Raises what EngineClient.submit raises; the choice has ended then."""
        self.cancel(index)
        self._running[index] = self._engine.submit(request, self._sink(index))

    def abort(self, error: str) -> None:
        """Cancel every choice that still runs, and tell the reader so by a Finish with `error`."""
        for index, request_id in list(self._running.items()):
            self.cancel(index)
            self._events.append((index, Finish(request_id, FinishReason.CANCELLED, 0, 0, 0, error)))
        self._wake()

    def close(self) -> None:
        """Cancel every choice that still runs, and whoever waits for them. Closing twice does nothing more."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._wake()
        for index in list(self._running):
            self.cancel(index)
