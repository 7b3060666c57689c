"""Notebook sessions in the core: calls, windows, company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ds4jax.config import EngineConfig
from ds4jax.errors import DecodeFailedError, DecodeInFlightError, QueueFullError, RequestError
from ds4jax.serving.engine.api import FinishReason, GenerateRequest, SamplingParams
from ds4jax.serving.engine.core import EngineCore
from tests.engine.fakes import FakeClock, FakeDevice, Record, alone, next_token, run

WINDOW_US = 2000


def engine(device: FakeDevice | None = None, **options: Any) -> tuple[EngineCore, FakeDevice, FakeClock]:
    device, clock = device or FakeDevice(), FakeClock()
    config = EngineConfig(slots=device.n_slots, ctx=device.n_ctx, prefill_quantum=16, mixed_prefill_quantum=4, **options)
    return EngineCore(device, config, clock), device, clock


def argmax(result: object) -> int:
    assert isinstance(result, np.ndarray) and result.ndim == 1, result
    return int(result.argmax())


def request(*prompt: int, n: int) -> GenerateRequest:
    return GenerateRequest(prompt, n, SamplingParams(seed=0))


def test_calls_append_and_return_the_logits_after_their_last_token() -> None:
    core, device, clock = engine()
    session = core.open_session()
    core.prefill(session, range(20))  # two chunks
    assert argmax(run(core, clock).result(session.id)) == next_token(range(20))
    core.prefill(session, [50, 51])
    assert argmax(run(core, clock).result(session.id)) == next_token([*range(20), 50, 51])
    core.decode(session, 7)
    assert argmax(run(core, clock).result(session.id)) == next_token([*range(20), 50, 51, 7])
    assert session.n_fed == 23 and session.tokens[-1] == 7


def test_a_second_call_is_refused_while_one_is_running() -> None:
    core, _, clock = engine()
    session = core.open_session()
    core.decode(session, 1)
    with pytest.raises(DecodeInFlightError, match="^session already has a decode in flight$"):
        core.decode(session, 2)
    run(core, clock)
    core.decode(session, 2)
    assert argmax(run(core, clock).result(session.id)) == next_token([1, 2])


def test_what_does_not_fit_is_refused() -> None:
    core, _, clock = engine()
    session = core.open_session()
    with pytest.raises(RequestError, match="holds 0 of 64 tokens, so 65 more do not fit"):
        core.prefill(session, range(65))
    with pytest.raises(RequestError, match="at least one"):
        core.prefill(session, [])
    core.prefill(session, range(64))
    run(core, clock)
    with pytest.raises(RequestError, match="holds 64 of 64"):
        core.decode(session, 1)


def test_sessions_take_slots_and_closing_gives_them_back_with_their_tokens() -> None:
    core, _, clock = engine(FakeDevice(n_slots=1), queue_limit=1)
    session = core.open_session()
    with pytest.raises(QueueFullError):
        core.open_session()
    core.prefill(session, [1, 2, 3])
    run(core, clock)
    waiting = core.submit(request(1, 2, 3, 4, n=2))
    with pytest.raises(QueueFullError):
        core.submit(request(1, n=1))
    assert run(core, clock).of(waiting) == []
    core.close_session(session)
    core.close_session(session)
    with pytest.raises(QueueFullError, match="1 requests are waiting"):  # the slot is promised
        core.open_session()
    record = run(core, clock)
    assert record.finish(waiting).n_cached == 3
    assert record.tokens(waiting) == alone(request(1, 2, 3, 4, n=2), 64)
    with pytest.raises(RequestError, match="this session is closed"):
        core.decode(session, 1)


def test_closing_in_flight_answers_the_call_and_frees_the_slot_after_the_step() -> None:
    core, _, clock = engine(FakeDevice(n_slots=2))
    one, two = core.open_session(), core.open_session()
    record = Record()
    core.decode(one, 1)
    core.decode(two, 2)
    record.events += core.step(clock.now_us).events
    core.close_session(one)
    core.close_session(two)
    run(core, clock, record)
    for session in (one, two):
        error = record.result(session.id)
        assert isinstance(error, RequestError) and "closed" in str(error)
    assert core.stats().n_running == 0
    core.open_session(), core.open_session()


def test_sessions_that_answer_within_the_window_share_batches() -> None:
    core, device, clock = engine()
    sessions = [core.open_session() for _ in range(3)]
    for turn in range(3):
        for session in sessions:
            core.decode(session, turn)
            core.step(clock.now_us)
            clock.now_us += 100
        run(core, clock)
    # Before its first decode nobody waits for a session; from the second round on all go together.
    assert [len(batch) for batch in device.batches][-2:] == [3, 3]


def test_sessions_out_of_step_fall_into_step() -> None:
    core, device, clock = engine()
    one, two = core.open_session(), core.open_session()
    core.decode(one, 1)
    core.step(clock.now_us)  # launched alone
    core.decode(two, 1)
    core.step(clock.now_us)  # reads the first, and leaves it a window
    core.decode(one, 2)
    run(core, clock)
    assert [len(batch) for batch in device.batches] == [1, 2]


def test_an_idle_session_costs_the_others_one_window_at_most() -> None:
    core, device, clock = engine(coalesce_us=WINDOW_US)
    session = core.open_session()
    core.decode(session, 1)
    run(core, clock)
    began_us = clock.now_us
    driven = core.submit(request(5, n=20))
    record = run(core, clock)
    assert record.tokens(driven) == alone(request(5, n=20), 64)
    assert clock.now_us - began_us == WINDOW_US == core.stats().coalesce_wait_us


def test_a_session_goes_along_with_driven_rows_without_stalling_them() -> None:
    core, device, clock = engine()
    session = core.open_session()
    driven = core.submit(request(5, n=12))
    record = Record()
    for _ in range(3):
        record.events += core.step(clock.now_us).events
    core.decode(session, 9)
    run(core, clock, record)
    assert argmax(record.result(session.id)) == next_token([9])
    assert record.tokens(driven) == alone(request(5, n=12), 64)
    assert sorted(map(len, device.batches)) == [1] * 10 + [2]
    launched = [index for what, index in device.trace if what == "decode"]
    for earlier, later in zip(launched, launched[1:], strict=False):  # the run-ahead never broke
        assert device.trace.index(("decode", later)) < device.trace.index(("read", earlier))


@pytest.mark.parametrize("cache_lost", [False, True])
def test_a_failed_call_raises_and_ends_the_session(cache_lost: bool) -> None:
    core, device, clock = engine(FakeDevice(n_slots=2, fail_read={1: cache_lost}))
    session, idle = core.open_session(), core.open_session()
    core.prefill(session, [1])
    run(core, clock)
    core.decode(session, 2)
    error = run(core, clock).result(session.id)
    assert isinstance(error, DecodeFailedError) and str(error) == "batched decode failed: step 1 broke"
    with pytest.raises(DecodeFailedError):
        core.decode(session, 3)
    if cache_lost:
        with pytest.raises(DecodeFailedError):
            core.decode(idle, 1)
    driven = core.submit(request(1, 2, n=3))
    assert run(core, clock).tokens(driven) == alone(request(1, 2, n=3), 64)


def test_close_ends_everything() -> None:
    core, _, clock = engine(FakeDevice(n_slots=2))
    session, driven, waiting = core.open_session(), core.submit(request(1, n=9)), core.submit(request(2, n=9))
    core.decode(session, 1)
    record = Record()
    record.events += core.step(clock.now_us).events
    record.events += core.close()
    assert record.finish(driven).reason is record.finish(waiting).reason is FinishReason.CANCELLED
    assert "engine is closed" in str(record.result(session.id))
