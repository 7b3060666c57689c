"""Requests through the engine without its thread."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from ds4jax.config import EngineConfig
from ds4jax.errors import ContextLengthError, QueueFullError, RequestError
from ds4jax.serving.engine.api import Finish, FinishReason, GenerateRequest, Prefilled, SamplingParams, Started, Token
from ds4jax.serving.engine.core import EngineCore, Returned
from tests.engine.fakes import FakeClock, FakeDevice, Record, alone, next_token, run


def request(*prompt: int, n: int | None = 6, seed: int = 0, stop: frozenset[int] = frozenset()) -> GenerateRequest:
    return GenerateRequest(prompt, n, SamplingParams(seed=seed), stop)


def engine(device: FakeDevice | None = None, **options: Any) -> tuple[EngineCore, FakeDevice, FakeClock]:
    device, clock = device or FakeDevice(), FakeClock()
    config = EngineConfig(slots=device.n_slots, ctx=device.n_ctx, prefill_quantum=16, mixed_prefill_quantum=4, **options)
    return EngineCore(device, config, clock), device, clock


def stopping(prompt: tuple[int, ...], n_before: int) -> GenerateRequest:
    """A request that samples its stop token after n_before tokens."""
    tokens = alone(request(*prompt, n=n_before + 1), 64)
    assert tokens[-1] not in tokens[:-1], "choose another prompt"
    return request(*prompt, n=None, stop=frozenset({tokens[-1]}))


# ---------------------------------------------------------------- one request
def test_a_request_tells_its_story_in_order() -> None:
    core, device, clock = engine()
    asked = request(*range(20), n=3)
    request_id = core.submit(asked)
    events = run(core, clock).events
    assert events == [
        Started(request_id, 20, 0),
        Prefilled(request_id, 16, 20),
        Prefilled(request_id, 20, 20),
        *(Token(request_id, token) for token in alone(asked, 64)),
        Finish(request_id, FinishReason.LENGTH, 20, 0, 3),
    ]
    assert [row.token for batch in device.batches for row in batch] == [None, None]  # fed on the device


def test_each_step_is_enqueued_before_the_last_one_is_read() -> None:
    core, device, clock = engine()
    core.submit(request(1, 2, n=4))
    run(core, clock)
    launch_1, launch_2, launch_3 = ("decode", 1), ("decode", 2), ("decode", 3)
    assert device.trace == [("prefill", 0), launch_1, ("read", 0), launch_2, ("read", 1), launch_3, ("read", 2), ("read", 3)]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_nothing_is_launched_beyond_a_known_last_token(n: int) -> None:
    core, device, clock = engine()
    core.submit(request(1, 2, n=n))
    run(core, clock)
    assert len(device.batches) == n - 1


def test_a_stop_token_is_found_one_step_late_and_not_delivered() -> None:
    core, device, clock = engine()
    asked = stopping((1, 2, 3), 4)
    request_id = core.submit(asked)
    record = run(core, clock)
    assert record.tokens(request_id) == alone(asked, 64)
    assert record.finish(request_id) == Finish(request_id, FinishReason.STOP, 3, 0, 4)
    assert len(device.batches) == 5  # four, and the one that was enqueued already


@pytest.mark.parametrize("n_prompt", [1, 60, 63])
def test_generation_ends_when_the_slot_is_full(n_prompt: int) -> None:
    core, device, clock = engine()
    request_id = core.submit(request(*[3] * n_prompt, n=None))
    finish = run(core, clock).finish(request_id)
    assert (finish.reason, finish.n_generated) == (FinishReason.LENGTH, 64 - n_prompt)


def test_impossible_requests_are_refused_with_the_field_at_fault() -> None:
    core, _, _ = engine()
    with pytest.raises(ContextLengthError, match="maximum context length is 64 tokens") as too_long:
        core.submit(request(*[1] * 64))
    assert too_long.value.param == "prompt"
    with pytest.raises(RequestError, match="at least one"):
        core.submit(request())
    with pytest.raises(RequestError, match="max_tokens: got 0"):
        core.submit(request(1, n=0))


def test_without_a_seed_the_engine_picks_one() -> None:
    core, device, clock = engine()
    for _ in range(2):
        core.submit(GenerateRequest((1,), 3))
    run(core, clock)
    seeds = {(row.slot, row.sampling.seed) for batch in device.batches for row in batch}
    assert len(seeds) == len({seed for _, seed in seeds}) == 2  # one for each request, kept from step to step


# ---------------------------------------------------------------- what a slot remembers
def test_the_next_turn_continues_the_slot_with_the_stop_token_that_was_fed() -> None:
    core, device, clock = engine()
    asked = stopping((1, 2, 3), 4)
    core.submit(asked)
    run(core, clock)
    (stop_token,) = asked.stop_token_ids
    turn = (*asked.prompt, *alone(asked, 64), stop_token, 50, 51)
    request_id = core.submit(request(*turn))
    record = run(core, clock)
    assert record.finish(request_id).n_cached == len(turn) - 2
    assert record.tokens(request_id) == alone(request(*turn), 64)
    assert device.cleared == []


def test_a_last_token_that_was_never_fed_is_not_remembered() -> None:
    core, _, clock = engine()
    asked = request(1, 2, 3, n=4)
    core.submit(asked)
    run(core, clock)
    turn = (*asked.prompt, *alone(asked, 64), 50)
    request_id = core.submit(request(*turn))
    record = run(core, clock)
    assert record.finish(request_id).n_cached == 3 + 4 - 1
    assert record.tokens(request_id) == alone(request(*turn), 64)


def test_a_used_slot_is_cleared_for_a_foreign_prompt() -> None:
    core, device, clock = engine(FakeDevice(n_slots=1))
    core.submit(request(1, 2))
    run(core, clock)
    request_id = core.submit(request(9, 9))
    assert run(core, clock).tokens(request_id) == alone(request(9, 9), 64)
    assert device.cleared == [0]


# ---------------------------------------------------------------- queue and cancel
def test_requests_queue_first_come_first_served_up_to_the_limit() -> None:
    core, _, clock = engine(FakeDevice(n_slots=2), queue_limit=2)
    ids = [core.submit(request(n)) for n in range(4)]
    with pytest.raises(QueueFullError, match="2 requests are waiting") as full:
        core.submit(request(5))
    assert full.value.n_waiting == 2
    record = run(core, clock)
    assert [event.request_id for event in record.events if isinstance(event, Started)] == ids
    core.submit(request(5))  # there is room again


@pytest.mark.parametrize("n_steps", range(8))
def test_cancel_at_any_moment_gives_one_finish_and_the_slot_back(n_steps: int) -> None:
    core, device, clock = engine(FakeDevice(n_slots=1))
    victim, heir = core.submit(request(*range(40), n=3)), core.submit(request(8, 9))
    record = Record()
    for _ in range(n_steps):
        record.events += core.step(clock.now_us).events
    core.cancel(victim)
    core.cancel(victim)
    core.cancel(12345)
    run(core, clock, record)
    assert record.finish(victim).reason is (FinishReason.LENGTH if n_steps >= 6 else FinishReason.CANCELLED)
    assert record.tokens(victim) == alone(request(*range(40), n=3), 64)[: len(record.tokens(victim))]
    assert record.tokens(heir) == alone(request(8, 9), 64)
    assert core.stats().n_running == core.stats().n_waiting == 0


def test_a_cancelled_waiter_leaves_the_queue() -> None:
    core, device, clock = engine(FakeDevice(n_slots=1))
    first, waiter = core.submit(request(1)), core.submit(request(2))
    record = Record()
    record.events += core.step(clock.now_us).events
    core.cancel(waiter)
    assert core.stats().n_waiting == 0
    run(core, clock, record)
    assert record.of(waiter) == [Finish(waiter, FinishReason.CANCELLED, 1, 0, 0)]
    assert record.tokens(first) == alone(request(1), 64)


def test_a_slot_is_not_passed_on_while_its_last_step_is_unread() -> None:
    core, device, clock = engine(FakeDevice(n_slots=1))
    victim = core.submit(request(1, 2, n=20))
    for _ in range(4):
        core.step(clock.now_us)
    core.submit(request(8, 9))
    core.cancel(victim)
    n_launched = len(device.batches)
    assert device.trace[-2:] != [("read", n_launched)]
    core.step(clock.now_us)
    assert device.trace[-1] == ("read", n_launched) and len(device.chunks) == 1  # read first
    core.step(clock.now_us)
    assert len(device.chunks) == 2


# ---------------------------------------------------------------- turns
def test_a_prompt_gets_its_chunks_while_others_decode() -> None:
    core, device, clock = engine(decode_steps_per_prefill=3)
    core.submit(request(1, n=40))
    for _ in range(3):
        core.step(clock.now_us)
    core.submit(request(*range(16), n=2))
    for _ in range(20):
        core.step(clock.now_us)
    kinds = "".join(what[0] for what, _ in device.trace if what != "read")
    assert [chunk for slot, chunk in device.chunks if slot == 1] == [tuple(range(n, n + 4)) for n in (0, 4, 8, 12)]  # the mixed quantum
    assert "dddd" not in kinds[: kinds.rindex("p")]


def test_decode_goes_on_while_many_prompts_wait() -> None:
    core, device, clock = engine()
    decoding = core.submit(request(1, n=30))
    for n in range(3):
        core.submit(request(*range(n, n + 50), n=1))
    record = run(core, clock)
    kinds = "".join(what[0] for what, _ in device.trace if what != "read")
    assert record.tokens(decoding) == alone(request(1, n=30), 64)
    assert "pp" not in kinds[kinds.index("d") : kinds.rindex("d")]


def real_sizes(n_slots: int, n_snapshots: int = 0) -> tuple[EngineCore, FakeDevice, FakeClock]:
    """An engine with the default quanta, and the shapes that a real device has then."""
    device = FakeDevice(n_slots, 4096, prefill_buckets=(128, 512, 2048), n_snapshots=n_snapshots)
    clock = FakeClock()
    return EngineCore(device, EngineConfig(slots=n_slots, ctx=4096), clock), device, clock


@pytest.mark.parametrize(("n_clients", "n_launches"), [(1, 1), (2, 1), (4, 1), (5, 2), (16, 1), (64, 4)])
def test_a_burst_of_short_prompts_takes_few_launches(n_clients: int, n_launches: int) -> None:
    core, device, clock = real_sizes(n_clients)
    asked = [request(n, *range(30), n=20) for n in range(n_clients)]
    ids = [core.submit(one) for one in asked]
    record = run(core, clock)
    for request_id, one in zip(ids, asked, strict=True):
        assert record.tokens(request_id) == alone(one, 4096)
    assert (core.stats().prefill_chunks, core.stats().prefill_rows) == (n_launches, n_clients)
    kinds = "".join(what[0] for what, _ in device.trace if what != "read")
    assert kinds[: kinds.rindex("p") + 1] == {64: "pddpddddpddddp", 5: "pddddp"}.get(n_clients, "p")


def test_prompts_that_go_together_pause_each_where_it_is_kept() -> None:
    """A notebook's and those of requests, longer than a piece, one launch after another."""
    core, device, clock = real_sizes(4, n_snapshots=16)
    session = core.open_session()
    core.prefill(session, range(90))
    asked = [request(n, *((n + i) % 97 for i in range(400 * n)), n=3) for n in range(3)]
    ids = [core.submit(one) for one in asked]
    record = run(core, clock)
    for request_id, one in zip(ids, asked, strict=True):
        assert record.tokens(request_id) == alone(one, 4096)
    (returned,) = (event for event in record.of(session.id) if isinstance(event, Returned))
    assert int(returned.result.argmax()) == next_token(range(90))  # type: ignore[union-attr]
    assert device.step_slots[0] == [0, 1] and device.step_slots.count([2, 3]) == 4  # the shorter of the two has 401 tokens
    assert {(2, 400), (3, 800)} <= set(device.saved)
    ids = [core.submit(one) for one in asked[1:]]
    run(core, clock, record)
    assert [record.finish(request_id).n_cached for request_id in ids] == [400, 800]


@pytest.mark.parametrize("n_steps", range(6))
def test_a_prompt_that_is_cancelled_leaves_those_that_went_with_it(n_steps: int) -> None:
    core, _, clock = real_sizes(4)
    asked = [request(n, *(i % 97 for i in range(200)), n=3) for n in range(4)]
    ids = [core.submit(one) for one in asked]
    record = Record()
    for _ in range(n_steps):
        record.events += core.step(clock.now_us).events
    core.cancel(ids[1])
    run(core, clock, record)
    for n, request_id in enumerate(ids):
        assert record.finish(request_id).reason is (FinishReason.CANCELLED if n == 1 else FinishReason.LENGTH)
        assert n == 1 or record.tokens(request_id) == alone(asked[n], 4096)
    assert core.stats().n_running == 0


# ---------------------------------------------------------------- what operators see
def test_stats_count_what_happened() -> None:
    core, _, clock = engine()
    for n in range(3):
        core.submit(request(n, n + 1, n=5))
    core.step(clock.now_us)
    assert (core.stats().n_running, core.stats().n_prefilling, core.stats().n_waiting) == (3, 0, 0)
    assert core.stats().kv_tokens == 6
    run(core, clock)
    stats = core.stats()
    assert stats.generated_tokens == 15 and stats.finished == {"length": 3}
    assert (stats.prefill_chunks, stats.prefill_rows, stats.prefill_tokens, stats.failed_steps) == (1, 3, 6, 0)
    assert sum(stats.rows.values()) == 12 and 0.5 < stats.occupancy <= 1.0
    assert sum(n_rows * n for n_rows, n in stats.batches.items()) == 12 and sum(stats.batches.values()) == sum(stats.steps.values())
    (pack,) = FakeDevice().pack_buckets or ()
    assert (stats.prompt_tokens, stats.prefill_padding, stats.kv_tokens) == (6, pack.n_rows * pack.n_tokens - 6, 0)


def test_the_batch_log_has_one_line_a_decode_step(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(fail_read={14: False})
    core, _, clock = engine(device, batch_log=True)
    for n in range(3):
        core.submit(request(n, n=20))
    with caplog.at_level(logging.INFO, "ds4jax.engine"):
        run(core, clock)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(device.batches)
    assert all(re.fullmatch(r"decode batch count=\d+ bucket=\d+ elapsed=\d+\.\d{3} ms status=(ok|error)", line) for line in lines)
    assert sum("count=3 bucket=4" in line for line in lines) >= 1
    assert sum("status=error" in line for line in lines) == 1
