"""plan() as a table: who is there, what time it is, what is launched."""

from __future__ import annotations

from ds4jax.config import EngineConfig
from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.engine.scheduler import Decode, Idle, Plan, Prefill, Turns, WaitUntil
from ds4jax.serving.engine.scheduler import plan as plan_next
from ds4jax.serving.engine.session import Session, State

CONFIG = EngineConfig(slots=4, ctx=8192, coalesce_us=2000, prefill_quantum=2048, mixed_prefill_quantum=128, decode_steps_per_prefill=4)


def prefilling(slot: int, n_prompt: int = 5000) -> Session:
    session = Session(slot, CONFIG.ctx, GenerateRequest(prompt=tuple(range(n_prompt))))
    session.start(slot, 0)
    return session


def generating(slot: int, since_us: int = 0) -> Session:
    session = prefilling(slot, 1)
    session.chunk_launched(1, since_us)
    assert session.state is State.PENDING
    return session


def manual(slot: int, state: State, since_us: int = 0, *, active: bool = True) -> Session:
    session = Session(slot, CONFIG.ctx)
    session.start(slot, 0)
    session.state, session.counts_as_active = state, active
    session.pending_since_us = session.idle_since_us = since_us
    return session


def plan(*sessions: Session, now_us: int = 0, turns: Turns | None = None, config: EngineConfig = CONFIG, max_chunk: int = 2048) -> Plan:
    return plan_next(sessions, now_us, config, turns or Turns(), max_chunk)


def test_nothing_to_do() -> None:
    assert plan() == Idle()
    assert plan(manual(0, State.IDLE)) == Idle()


def test_a_lone_stream_and_a_full_house_never_wait() -> None:
    one = generating(0)
    assert plan(one) == Decode((one,))
    all_four = [generating(0), manual(1, State.PENDING), generating(2), manual(3, State.PENDING)]
    assert plan(*all_four) == Decode(tuple(all_four))


def test_the_window_waits_for_a_manual_session_and_closes_at_its_end() -> None:
    pending, straggler = manual(0, State.PENDING, 500), manual(1, State.IDLE, 100)
    assert plan(pending, straggler, now_us=600) == WaitUntil(2500)
    assert plan(pending, straggler, now_us=2499) == WaitUntil(2500)
    assert plan(pending, straggler, now_us=2500) == Decode((pending,))


def test_the_window_counts_from_the_moment_the_straggler_could_answer() -> None:
    pending, straggler = generating(0, 500), manual(1, State.IDLE, 9000)
    assert plan(pending, straggler, now_us=9100) == WaitUntil(11_000)


def test_a_running_window_closes_when_the_last_active_one_becomes_pending() -> None:
    pending, straggler = manual(0, State.PENDING, 500), manual(1, State.IDLE, 100)
    assert isinstance(plan(pending, straggler, now_us=600), WaitUntil)
    straggler.feed_token(1, 700)
    assert plan(pending, straggler, now_us=700) == Decode((pending, straggler))


def test_nobody_waits_for_an_inactive_session_or_with_a_window_of_zero() -> None:
    pending = generating(0)
    assert plan(pending, manual(1, State.IDLE, active=False)) == Decode((pending,))
    assert plan(pending, manual(1, State.IDLE), config=EngineConfig(coalesce_us=0)) == Decode((pending,))


def test_manual_sessions_stay_in_step_but_driven_ones_run_ahead() -> None:
    pending, flying = manual(0, State.PENDING), manual(1, State.IN_FLIGHT)
    assert plan(pending, flying) == Idle()  # the result is read first
    driven = generating(2)
    assert plan(pending, flying, driven) == Decode((pending, driven))


def test_quantum_depends_on_whether_somebody_decodes() -> None:
    waiting = prefilling(1)
    assert plan(waiting) == Prefill(waiting, 2048)
    assert plan(waiting, max_chunk=512) == Prefill(waiting, 512)
    assert plan(manual(0, State.IDLE, active=False), waiting) == Prefill(waiting, 2048)
    assert plan(manual(0, State.IDLE), waiting) == Prefill(waiting, 128)  # nobody is pending: it runs at once
    short = prefilling(0, 7)
    assert plan(short) == Prefill(short, 7)


def test_decode_yields_to_a_waiting_prefill_every_few_steps() -> None:
    decoding, waiting = generating(0), prefilling(1)
    turns, launched = Turns(), []
    for _ in range(15):
        todo = plan(decoding, waiting, turns=turns)
        launched.append("P" if isinstance(todo, Prefill) else "D")
        turns = turns.after(todo)
    assert "".join(launched) == "DDDDPDDDDPDDDDP"


def test_waiting_prefills_take_turns() -> None:
    sessions = [prefilling(0), prefilling(2), prefilling(3)]
    turns, slots = Turns(), []
    for _ in range(5):
        todo = plan(*sessions, turns=turns)
        assert isinstance(todo, Prefill)
        slots.append(todo.session.slot)
        turns = turns.after(todo)
    assert slots == [0, 2, 3, 0, 2]
