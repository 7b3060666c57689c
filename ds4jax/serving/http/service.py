"""The bridge between the engine's thread and the asyncio loop: events of one API call as an awaitable stream that can be closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ds4jax.errors import EngineStoppedError, QueueFullError, RequestError
from ds4jax.serving.engine.api import EngineClient, Event, Finish, FinishReason, GenerateRequest

IndexedEvent = tuple[int, Event]


class EventStream:
    """Events of one API call, which may be several engine requests (one a choice), merged in order of arrival.

    The engine never waits for us: its thread only schedules a callback on the loop, and events pile up here while a
    client reads slowly. Closing cancels whatever still runs, each request once, and never one that has finished.
    """

    def __init__(
        self,
        engine: EngineClient,
        requests: Sequence[GenerateRequest],
        many: str = "prompt",
        on_arrival: Callable[[int, Event], None] = lambda index, event: None,
    ) -> None:
        """Submit the requests, all or none. Call it on the loop that will read the events.

        many: the field by which a client asks for several. on_arrival: told every event when it reaches the loop, whenever it is read.
        Raises what EngineClient.submit raises; requests submitted before the refused one are cancelled. What the queue has no room for is
        refused before any of it takes the place of others' requests. More requests than the server ever holds raise RequestError
        instead of QueueFullError: no retry could succeed.
        """
        self._engine, self._on_arrival = engine, on_arrival
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._events: list[IndexedEvent] = []
        self._closed = False
        self._running: dict[int, int] = {}  # choice index -> engine request id
        try:
            for index, request in enumerate(requests):
                n_more = len(requests) - index - 1
                self._running[index] = engine.submit(request, partial(self._deliver, index), n_more)
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

    def _deliver(self, index: int, event: Event) -> None:
        """Take an event on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._receive, index, event)
        except RuntimeError:  # the loop is closed: nobody is left to read, and the engine's thread must not pay for it
            pass

    def _receive(self, index: int, event: Event) -> None:
        """Take an event on the loop."""
        if self._running.get(index) != event.request_id:
            return  # cancelled meanwhile
        if isinstance(event, Finish):
            del self._running[index]
        self._on_arrival(index, event)
        self._events.append((index, event))
        self._arrived.set()

    async def batch(self, until: float) -> list[IndexedEvent]:
        """Wait for events, at most until the loop's clock shows `until` (seconds); return all that have arrived.

        Everything queued comes at once, so that a reader who fell behind catches up in one write. An empty list means
        silence. Raises CancelledError once the stream is closed, and EngineStoppedError when the engine died and can send nothing any more.
        """
        if not self._events:
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._arrived.wait()
            except TimeoutError:
                if not self._engine.alive():
                    raise EngineStoppedError("the engine stopped while this request was running; restart the server") from None
        if self._closed:
            raise asyncio.CancelledError
        events, self._events = self._events, []
        return events

    def cancel(self, index: int) -> None:
        """Cancel one choice if it still runs; no event of it arrives after this."""
        request_id = self._running.pop(index, None)
        if request_id is not None:
            self._engine.cancel(request_id)

    def restart(self, index: int, request: GenerateRequest) -> None:
        """Let another request take the place of a choice. Raises what EngineClient.submit raises; the choice has ended then."""
        self.cancel(index)
        self._running[index] = self._engine.submit(request, partial(self._deliver, index))

    def abort(self, error: str) -> None:
        """Cancel every choice that still runs, and tell the reader so by a Finish with `error`."""
        for index, request_id in list(self._running.items()):
            self.cancel(index)
            self._events.append((index, Finish(request_id, FinishReason.CANCELLED, 0, 0, 0, error)))
        self._arrived.set()

    def close(self) -> None:
        """Cancel every choice that still runs, and whoever waits for them. Closing twice does nothing more."""
        self._closed = True
        self._arrived.set()
        for index in list(self._running):
            self.cancel(index)
