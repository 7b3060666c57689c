"""The bridge between the engine's thread and the loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ds4jax.errors import EngineStoppedError
from ds4jax.serving.engine.api import Event, Finish, FinishReason, GenerateRequest, Prefilled, Token
from ds4jax.serving.http.service import EventStream, Postbox


class CountingLoop:
    """Stands for a loop that is busy: it remembers what it is asked to call, and calls when it is told to."""

    def __init__(self, *, closed: bool = False) -> None:
        self.calls: list[Any] = []
        self.closed = closed

    def call_soon_threadsafe(self, callback: Any) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(callback)


class SilentEngine:
    """Takes requests and leaves it to the test what comes of them."""

    n_ctx = 64

    def __init__(self) -> None:
        self.sinks: list[Any] = []
        self.is_alive = True

    def submit(self, request: GenerateRequest, sink: Any, n_more: int = 0) -> int:
        self.sinks.append(sink)
        return len(self.sinks)

    def cancel(self, request_id: int) -> None: ...

    def alive(self) -> bool:
        return self.is_alive


def test_a_step_for_many_rings_once() -> None:
    loop, got = CountingLoop(), []
    box = Postbox(loop)  # type: ignore[arg-type]
    for step in range(3):
        for i in range(64):
            box.post(got.append, Token(i, step))
        assert len(loop.calls) == step + 1
        loop.calls[-1]()
        assert got[-64:] == [Token(i, step) for i in range(64)]


def test_a_letter_that_comes_while_the_box_is_emptied_is_not_forgotten() -> None:
    loop, got = CountingLoop(), []
    box = Postbox(loop)  # type: ignore[arg-type]
    box.post(lambda event: box.post(got.append, event), Token(1, 1))
    for call in loop.calls:
        call()
    assert got == [Token(1, 1)]


def test_a_closed_loop_costs_the_engine_nothing() -> None:
    box = Postbox(CountingLoop(closed=True))  # type: ignore[arg-type]
    for _ in range(3):
        box.post(lambda event: pytest.fail("nobody reads"), Token(1, 1))


def test_every_event_of_two_threads_arrives_in_order() -> None:
    n = 2000

    async def read() -> dict[int, list[int]]:
        box, got, done = Postbox(asyncio.get_running_loop()), {0: [], 1: []}, asyncio.Event()

        def receive(event: Event) -> None:
            assert isinstance(event, Token)
            got[event.request_id].append(event.token)
            if all(len(tokens) == n for tokens in got.values()):
                done.set()

        threads = [threading.Thread(target=lambda i=i: [box.post(receive, Token(i, k)) for k in range(n)]) for i in got]
        for thread in threads:
            thread.start()
        async with asyncio.timeout(20):
            await done.wait()
        for thread in threads:
            thread.join()
        return got

    assert asyncio.run(read()) == {0: list(range(n)), 1: list(range(n))}


def test_silence_is_measured_from_the_last_wait_and_needs_a_living_engine() -> None:
    async def listen() -> None:
        loop, engine = asyncio.get_running_loop(), SilentEngine()
        stream = EventStream(engine, [GenerateRequest((1,))], Postbox(loop))  # type: ignore[arg-type]
        loop.call_soon(engine.sinks[0], Prefilled(1, 1, 1))
        began = loop.time()
        assert await stream.batch(began + 0.05) == [(0, Prefilled(1, 1, 1))]
        assert await stream.batch(began + 0.1) == []  # past the first alarm, which was set for 0.05 s
        assert loop.time() >= began + 0.1
        assert await stream.batch(loop.time() + 0.01) == []  # sooner than any alarm
        engine.is_alive = False
        with pytest.raises(EngineStoppedError):
            await stream.batch(loop.time() + 0.01)
        engine.sinks[0](Finish(1, FinishReason.LENGTH, 1, 0, 0))
        await asyncio.sleep(0)
        assert len(await stream.batch(loop.time() + 5)) == 1
        stream.close()
        with pytest.raises(asyncio.CancelledError):
            await stream.batch(loop.time() + 5)

    asyncio.run(listen())
