"""The engine with its thread, driven from real threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep
from typing import Any

import numpy as np
import pytest

from ds4jax.config import EngineConfig
from ds4jax.errors import ContextLengthError, DecodeInFlightError, Ds4jaxError, EngineStoppedError, QueueFullError, RequestError
from ds4jax.serving.engine.api import EngineClient, Event, Finish, FinishReason, GenerateRequest, SamplingParams, Token
from ds4jax.serving.engine.loop import Engine
from tests.engine.fakes import FakeDevice, alone, next_token

TIMEOUT_S = 20
SEED_0 = SamplingParams(seed=0)


def request(*prompt: int, n: int = 8) -> GenerateRequest:
    return GenerateRequest(prompt, n, SEED_0)


def config(device: FakeDevice, **options: Any) -> EngineConfig:
    return EngineConfig(slots=device.n_slots, ctx=device.n_ctx, prefill_quantum=16, mixed_prefill_quantum=4, **options)


@contextmanager
def running(device: FakeDevice | None = None, **options: Any) -> Iterator[tuple[Engine, FakeDevice]]:
    device = device or FakeDevice()
    with Engine(device, config(device, **options)) as engine:
        try:
            yield engine, device
        finally:
            device.let_go()


class Mailbox:
    """A sink that another thread reads."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.tokens: list[int] = []

    def __call__(self, event: Event) -> None:
        self._events.put(event)

    def finish(self) -> Finish:
        while True:
            event = self._events.get(timeout=TIMEOUT_S)
            if isinstance(event, Finish):
                assert self._events.empty()
                return event
            if isinstance(event, Token):
                self.tokens.append(event.token)


def eventually(condition: Callable[[], bool]) -> None:
    for _ in range(TIMEOUT_S * 200):
        if condition():
            return
        sleep(0.005)
    raise AssertionError("it never came true")


def test_it_is_an_engine_client() -> None:
    with running() as (engine, device):
        client: EngineClient = engine
        assert client.n_ctx == 64 and client.alive() and client.stats().n_slots == 4


def test_requests_from_many_threads_get_their_own_tokens() -> None:
    def ask(n: int) -> tuple[list[int], Finish]:
        box = Mailbox()
        engine.submit(request(n, n % 3), box)
        finish = box.finish()
        return box.tokens, finish

    with running(queue_limit=40) as (engine, device), ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(ask, range(40)))
    for n, (tokens, finish) in enumerate(answers):
        assert tokens == alone(request(n, n % 3), 64) and finish.reason is FinishReason.LENGTH
    assert engine.stats().finished == {"length": 40} and engine.stats().n_running == 0


def test_refusals_reach_the_caller_at_once() -> None:
    with running(FakeDevice(n_slots=1), queue_limit=1) as (engine, device):
        device.hold_reads()
        first, second = Mailbox(), Mailbox()
        engine.submit(request(1), first)
        engine.submit(request(2), second)
        with pytest.raises(QueueFullError, match="1 requests are waiting"):
            engine.submit(request(3), Mailbox())
        with pytest.raises(ContextLengthError):
            engine.submit(request(*[1] * 64), Mailbox())
        device.let_go()
        first.finish(), second.finish()
        assert second.tokens == alone(request(2), 64)


def test_one_of_several_is_refused_where_the_others_would_be() -> None:
    with running(FakeDevice(n_slots=2), queue_limit=1) as (engine, device):
        device.hold_reads()
        box = Mailbox()
        engine.submit(request(1), box)
        for n_more, n_most in ((2, 3), (9, 3)):
            with pytest.raises(QueueFullError, match="0 requests are waiting") as full:
                engine.submit(request(2), Mailbox(), n_more)
            assert full.value.n_most == n_most
        second, third = Mailbox(), Mailbox()
        engine.submit(request(2), second, 1)
        engine.submit(request(3), third)
        device.let_go()
        for mailbox in (box, second, third):
            mailbox.finish()


def test_cancel_frees_the_slot_for_the_next_in_line() -> None:
    with running(FakeDevice(n_slots=1)) as (engine, device):
        device.hold_reads()
        first, second = Mailbox(), Mailbox()
        victim = engine.submit(request(1, n=60), first)
        engine.submit(request(2), second)
        engine.cancel(victim)
        engine.cancel(999)
        device.let_go()
        assert first.finish().reason is FinishReason.CANCELLED
        assert second.finish().reason is FinishReason.LENGTH


def test_a_sink_that_raises_is_dropped_alone() -> None:
    def bad(event: Event) -> None:
        raise OSError("the client is gone")

    with running(FakeDevice(n_slots=1)) as (engine, device):
        good = Mailbox()
        engine.submit(request(1, n=60), bad)
        engine.submit(request(2), good)
        good.finish()
        assert good.tokens == alone(request(2), 64) and engine.alive()
        assert engine.stats().finished["cancelled"] == 1


def test_sinks_may_submit_and_close() -> None:
    with running() as (engine, device):
        second = Mailbox()

        def chain(event: Event) -> None:
            if isinstance(event, Finish):
                engine.submit(request(2), second)

        engine.submit(request(1), chain)
        second.finish()
        assert second.tokens == alone(request(2), 64)
        engine.submit(request(3), lambda event: engine.close())
        eventually(lambda: not engine.alive())


# ---------------------------------------------------------------- notebooks
def test_calls_of_several_threads_share_batches() -> None:
    """All play until a batch of four was seen; how long the machine takes to get four threads going does not matter."""
    with running(FakeDevice(n_ctx=1024), coalesce_us=100_000) as (engine, device):
        sessions = [engine.open_session() for _ in range(4)]

        def play(n: int) -> None:
            history = [n, n]
            logits = sessions[n].prefill(history)
            while len(history) < 1000 and not any(len(batch) == 4 for batch in device.batches):
                token = int(logits.argmax())
                assert token == next_token(history)
                history.append(token)
                logits = sessions[n].decode(token)
            assert sessions[n].tokens == tuple(history) and sessions[n].position == len(history)

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(play, range(4)))
        assert any(len(batch) == 4 for batch in device.batches)


def test_a_second_decode_is_refused_even_while_the_step_runs() -> None:
    with running() as (engine, device), ThreadPoolExecutor(1) as threads:
        session = engine.open_session()
        device.hold_reads()
        first = threads.submit(session.decode, 5)
        eventually(lambda: len(device.batches) == 1)
        with pytest.raises(DecodeInFlightError, match="^session already has a decode in flight$"):
            session.decode(6)
        device.let_go()
        assert int(first.result(TIMEOUT_S).argmax()) == next_token([5])
        assert int(session.decode(6).argmax()) == next_token([5, 6])


def test_two_sessions_close_while_their_step_runs() -> None:
    with running(FakeDevice(n_slots=2)) as (engine, device), ThreadPoolExecutor(4) as threads:
        sessions = [engine.open_session(), engine.open_session()]
        with pytest.raises(QueueFullError):
            engine.open_session()
        device.hold_reads()
        calls = [threads.submit(session.decode, 5) for session in sessions]
        eventually(lambda: len(device.step_slots) >= 1)
        closings = [threads.submit(session.close) for session in sessions]
        device.let_go()
        for closing in closings:
            closing.result(TIMEOUT_S)
        for call in calls:  # its result came first, or the end of its session
            error = call.exception(TIMEOUT_S)
            assert error is None or isinstance(error, RequestError)
        box = Mailbox()
        engine.submit(request(1), box)
        assert box.finish().reason is FinishReason.LENGTH
        with pytest.raises(RequestError, match="this session is closed"):
            sessions[0].decode(1)


def test_a_session_is_a_context_manager_and_gives_its_slot_back() -> None:
    with running(FakeDevice(n_slots=1)) as (engine, device):
        for n in range(3):
            with engine.open_session() as session:
                assert int(session.prefill(np.arange(n + 1).tolist()).argmax()) == next_token(range(n + 1))


def test_a_refused_call_leaves_the_session_usable() -> None:
    with running() as (engine, device):
        session = engine.open_session()
        with pytest.raises(RequestError, match="do not fit"):
            session.prefill(range(90))
        assert int(session.decode(1).argmax()) == next_token([1])


def test_generate_tokens_is_an_iterator_whose_end_cancels() -> None:
    with running(FakeDevice(n_slots=1)) as (engine, device):
        assert list(engine.generate_tokens([1, 2], 8, SEED_0)) == alone(request(1, 2), 64)
        stream = engine.generate_tokens([3], None, SEED_0)
        assert next(stream) == alone(request(3), 64)[0]
        stream.close()
        assert list(engine.generate_tokens([4], 8, SEED_0)) == alone(request(4), 64)
        assert engine.stats().finished.get("cancelled", 0) + engine.stats().finished["length"] == 3


def test_generate_tokens_raises_what_went_wrong() -> None:
    with running(FakeDevice(fail_read={1: False})) as (engine, device):
        with pytest.raises(Ds4jaxError, match="batched decode failed: step 1 broke"):
            list(engine.generate_tokens([1], 8, SEED_0))


# ---------------------------------------------------------------- the end
def test_close_ends_requests_calls_and_streams() -> None:
    device = FakeDevice(n_slots=2)
    engine = Engine(device, config(device))
    with ThreadPoolExecutor(2) as threads:
        session = engine.open_session()
        device.hold_reads()
        call = threads.submit(session.decode, 1)
        box, waiting = Mailbox(), Mailbox()
        engine.submit(request(1, n=60), box)
        engine.submit(request(2, n=60), waiting)
        eventually(lambda: len(device.step_slots) >= 2 or len(device.batches) == 1)
        closing = threads.submit(engine.close)
        device.let_go()
        closing.result(TIMEOUT_S)
        assert box.finish().reason is waiting.finish().reason is FinishReason.CANCELLED
        error = call.exception(TIMEOUT_S)
        assert error is None or isinstance(error, EngineStoppedError)
    engine.close()
    assert not engine.alive()
    session.close()
    for late in (lambda: engine.submit(request(1), box), engine.open_session, lambda: session.decode(1)):
        with pytest.raises(EngineStoppedError, match="the engine is closed"):
            late()


def test_nobody_hangs_when_the_thread_dies_of_a_bug() -> None:
    device = FakeDevice(break_at=6)
    with Engine(device, config(device)) as engine, ThreadPoolExecutor(1) as threads:
        session = engine.open_session()
        device.hold_reads()
        call = threads.submit(session.prefill, range(64))
        box = Mailbox()
        engine.submit(request(1, n=60), box)
        device.let_go()
        finish = box.finish()
        assert finish.reason is FinishReason.ERROR and finish.error is not None and "ZeroDivisionError: a bug" in finish.error
        error = call.exception(TIMEOUT_S)
        assert error is None or isinstance(error, EngineStoppedError)
        eventually(lambda: not engine.alive())
        with pytest.raises(EngineStoppedError, match="internal error"):
            engine.submit(request(1), Mailbox())


def test_alive_notices_a_step_that_hangs() -> None:
    device = FakeDevice()
    with Engine(device, config(device), hang_after_s=0.05) as engine:
        device.hold_reads()
        box = Mailbox()
        engine.submit(request(1), box)
        eventually(lambda: not engine.alive())
        device.let_go()
        box.finish()
        eventually(engine.alive)


def test_an_idle_engine_sleeps() -> None:
    """Waiting for work takes no steps: the condition is waited on, not polled."""
    before = threading.active_count()
    with running() as (engine, device):
        list(engine.generate_tokens([1], 2, SEED_0))
        sleep(0.1)  # the last step may still be on its way
        began = engine.stats()
        sleep(0.1)
        assert engine.stats() is began  # a step would have published new ones
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
