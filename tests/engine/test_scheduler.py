"""plan() as a table: who is there, what time it is, what is launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.config import EngineConfig
from ds4jax.serving.engine.api import GenerateRequest
from ds4jax.serving.engine.buckets import PrefillShape, chunk_buckets, pack_buckets, prefill_shape
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


def plan(
    *sessions: Session,
    now_us: int = 0,
    turns: Turns | None = None,
    config: EngineConfig = CONFIG,
    max_chunk: int = 2048,
    packs: Sequence[PrefillShape] = (),
) -> Plan:
    return plan_next(sessions, now_us, config, turns or Turns(), max_chunk, packs)


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


def one(session: Session, n_tokens: int) -> Prefill:
    return Prefill((session,), (n_tokens,))


def test_quantum_depends_on_whether_somebody_decodes() -> None:
    waiting = prefilling(1)
    assert plan(waiting) == one(waiting, 2048)
    assert plan(waiting, max_chunk=512) == one(waiting, 512)
    assert plan(manual(0, State.IDLE, active=False), waiting) == one(waiting, 2048)
    assert plan(manual(0, State.IDLE), waiting) == one(waiting, 128)  # nobody is pending: it runs at once
    short = prefilling(0, 7)
    assert plan(short) == one(short, 7)


def order_of_launches(n: int, *sessions: Session) -> str:
    """Plan n launches; sessions stay as they are."""
    turns, launched = Turns(), []
    for _ in range(n):
        todo = plan(*sessions, turns=turns)
        launched.append("P" if isinstance(todo, Prefill) else "D")
        turns = turns.after(todo)
    return "".join(launched)


def test_decode_yields_to_a_waiting_prefill_every_few_steps() -> None:
    assert order_of_launches(15, generating(0), prefilling(1)) == "DDDDPDDDDPDDDDP"


def test_prompts_get_turns_more_often_where_more_of_them_wait_than_decode() -> None:
    assert order_of_launches(8, generating(0), generating(1), prefilling(2), prefilling(3)) == "DDDDPDDD"
    assert order_of_launches(8, generating(0), *map(prefilling, range(1, 3))) == "DDPDDPDD"
    assert order_of_launches(8, generating(0), *map(prefilling, range(1, 10))) == "DPDPDPDP"  # never twice without a step between


def test_waiting_prefills_take_turns() -> None:
    sessions = [prefilling(0), prefilling(2), prefilling(3)]
    slots = []
    for _ in range(5):
        todo = plan(*sessions)
        assert isinstance(todo, Prefill)
        slots += [session.slot for session in todo.rows]
        launch(todo)
    assert slots == [0, 2, 3, 0, 2]


def launch(todo: Prefill) -> None:
    for session, n_tokens in zip(todo.rows, todo.n_tokens, strict=True):
        session.chunk_launched(n_tokens, 0)


# ---------------------------------------------------------------- packs
PACKS = (PrefillShape(4, 128), PrefillShape(16, 128))


def test_short_prompts_go_together_the_oldest_first() -> None:
    sessions = [prefilling(slot, 10 + slot) for slot in (5, 3, 9, 1, 0, 2)]
    todo = plan(*sorted(sessions, key=lambda s: s.slot or 0), packs=PACKS)
    assert todo == Prefill(tuple(sessions[:4]), (15, 13, 19, 11))
    many = [prefilling(slot, 128) for slot in range(20)]
    assert plan(*many, packs=PACKS) == Prefill(tuple(many[:16]), (128,) * 16)


@pytest.mark.parametrize(("n", "n_rows"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 4), (7, 4), (8, 8), (15, 15), (17, 16)])
def test_a_pack_is_at_least_half_full(n: int, n_rows: int) -> None:
    todo = plan(*(prefilling(slot, 50) for slot in range(n)), packs=PACKS)
    assert isinstance(todo, Prefill) and len(todo.rows) == n_rows


def test_neither_long_nor_short_prompts_wait_for_the_others() -> None:
    long, *short = prefilling(0), prefilling(1, 5), prefilling(2, 128), prefilling(3, 129)
    assert plan(long, *short, packs=PACKS) == one(long, 2048)
    launch(one(long, 2048))
    assert plan(long, *short, packs=PACKS) == Prefill((short[0], short[1]), (5, 128))
    decoding = generating(4)
    beside = plan(decoding, long, *short, packs=PACKS, turns=Turns(decode_steps=1))
    assert beside == Prefill((*short, long), (5, 128, 128, 128))


def test_a_piece_ends_where_its_prompt_pauses() -> None:
    sessions = [prefilling(0, 300), prefilling(1, 300)]
    sessions[0].stops, sessions[1].save_stops = [90, 250], [7]
    assert plan(*sessions, packs=PACKS) == Prefill(tuple(sessions), (90, 7))


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=24),
    n_decoding=st.integers(0, 12),
    arrivals=st.lists(st.integers(0, 3), max_size=40),
    quantum=st.sampled_from([128, 512, 2048]),
    mixed=st.sampled_from([32, 128, 512]),
    every=st.integers(1, 5),
)
def test_nobody_starves_and_no_launch_is_too_large(
    lengths: list[int], n_decoding: int, arrivals: list[int], quantum: int, mixed: int, every: int
) -> None:
    """Whoever stands at place p of the queue has its turn within p launches, and those are never far apart, whoever comes later."""
    config = replace(CONFIG, slots=200, prefill_quantum=quantum, mixed_prefill_quantum=mixed, decode_steps_per_prefill=every)
    packs, turns = pack_buckets(config.slots, config.ctx, quantum, mixed), Turns()
    decoding = [generating(slot) for slot in range(n_decoding)]
    waiting = [prefilling(100 + i, n) for i, n in enumerate(lengths)]
    allowed = {session.id: place for place, session in enumerate(waiting)}  # launches that may still go by before its turn
    coming = iter(arrivals)
    for number in range(1000):
        for _ in range(next(coming, 0)):
            newcomer = prefilling(1000 + len(allowed), 5)
            waiting.append(newcomer)
            allowed[newcomer.id] = len(waiting) - 1
        todo = plan_next([*decoding, *waiting], 0, config, turns, quantum, packs)
        steps_before, turns = turns.decode_steps, turns.after(todo)
        if not isinstance(todo, Prefill):
            assert isinstance(todo, Decode) and turns.decode_steps <= every
            continue
        assert steps_before >= (number > 0 and n_decoding > 0)
        shape = prefill_shape(todo.n_tokens, chunk_buckets(config.ctx, quantum, mixed), packs)
        assert shape.n_rows * shape.n_tokens <= max(quantum, mixed)
        assert 2 * len(todo.rows) >= shape.n_rows
        assert max(todo.n_tokens) <= (mixed if n_decoding else quantum)
        launch(todo)
        for session in waiting:
            assert session in todo.rows or allowed[session.id] > 0, "it was not its turn"
            allowed[session.id] -= 1
        waiting = [session for session in waiting if session.n_unfed]
        for session in todo.rows:
            allowed[session.id] = len(waiting)
        if not waiting:
            return
    raise AssertionError("prompts are still waiting")
