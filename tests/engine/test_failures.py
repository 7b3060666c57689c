"""Steps that fail: who ends, who goes on, and what becomes of the slots."""

from __future__ import annotations

import pytest

from ds4jax.config import EngineConfig
from ds4jax.serving.engine.api import Finish, FinishReason, GenerateRequest, SamplingParams
from ds4jax.serving.engine.core import EngineCore
from tests.engine.fakes import FakeClock, FakeDevice, Record, alone, run


def request(*prompt: int, n: int = 8) -> GenerateRequest:
    return GenerateRequest(prompt, n, SamplingParams(seed=0))


def engine(device: FakeDevice) -> tuple[EngineCore, FakeClock]:
    clock = FakeClock()
    config = EngineConfig(slots=device.n_slots, ctx=device.n_ctx, prefill_quantum=16, mixed_prefill_quantum=4)
    return EngineCore(device, config, clock), clock


def check_ends(
    record: Record, request_id: int, asked: GenerateRequest, *, failed: bool, error: str = "batched decode failed: step"
) -> None:
    finish, tokens = record.finish(request_id), record.tokens(request_id)
    if failed:
        assert finish.reason is FinishReason.ERROR and finish.error is not None and finish.error.startswith(error)
    else:
        assert finish.reason is FinishReason.LENGTH and finish.error is None
    expected = alone(asked, 64)
    assert tokens == (expected[: len(tokens)] if failed else expected)


def check_usable(core: EngineCore, clock: FakeClock, n_slots: int) -> None:
    """All slots serve again, also prompts that continue what had failed."""
    asked = [request(n, 2, 3) for n in range(n_slots)]
    ids = [core.submit(one) for one in asked]
    record = run(core, clock)
    for request_id, one in zip(ids, asked, strict=True):
        check_ends(record, request_id, one, failed=False)
    assert core.stats().n_running == 0


@pytest.mark.parametrize("where", ["fail_launch", "fail_read"])
@pytest.mark.parametrize("cache_lost", [False, True])
@pytest.mark.parametrize("step", range(8))
def test_only_the_batch_ends_unless_the_cache_is_lost(step: int, cache_lost: bool, where: str) -> None:
    device = FakeDevice(n_slots=3)
    getattr(device, where)[step] = cache_lost
    core, clock = engine(device)
    asked = [request(0, 2, n=4), request(1, 2, n=6), request(2, 2)]
    ids = [core.submit(one) for one in asked]
    record = run(core, clock)
    failed = {request_id for request_id in ids if record.finish(request_id).reason is FinishReason.ERROR}
    for request_id, one in zip(ids, asked, strict=True):
        check_ends(record, request_id, one, failed=request_id in failed)
    finishes = [event for event in record.events if isinstance(event, Finish)]
    n_before = next(n for n, finish in enumerate(finishes) if finish.reason is FinishReason.ERROR)
    ended_before = {finish.request_id for finish in finishes[:n_before]}
    assert failed == (set(ids) - ended_before if cache_lost else {ids[slot] for slot in device.step_slots[step]})
    assert core.stats().failed_steps == 1
    check_usable(core, clock, 3)


def test_a_failed_decode_does_not_touch_a_prompt_in_progress() -> None:
    device = FakeDevice(n_slots=2, fail_read={3: False})
    core, clock = engine(device)
    first = core.submit(request(1, n=30))
    record = Record()
    record.events += core.step(clock.now_us).events
    second = core.submit(request(*range(20)))
    run(core, clock, record)
    check_ends(record, first, request(1, n=30), failed=True)
    check_ends(record, second, request(*range(20)), failed=False)


@pytest.mark.parametrize("where", ["fail_launch", "fail_read"])
def test_a_failed_prefill_ends_the_prompts_that_went_together_and_no_other(where: str) -> None:
    device = FakeDevice(n_slots=6)
    getattr(device, where)[0] = False
    core, clock = engine(device)
    asked = [request(n, 2) for n in range(6)]
    ids = [core.submit(one) for one in asked]
    record = run(core, clock)
    assert device.step_slots[0] == [0, 1, 2, 3]
    for n, request_id in enumerate(ids):
        check_ends(record, request_id, asked[n], failed=n < 4)
    check_usable(core, clock, 6)


def test_the_step_that_was_enqueued_behind_a_failure_is_discarded() -> None:
    device = FakeDevice(n_slots=1, fail_read={2: False})
    core, clock = engine(device)
    request_id = core.submit(request(5, n=20))
    record = run(core, clock)
    assert record.tokens(request_id) == alone(request(5), 64)[:2]  # of the prompt and of step 1
    assert device.trace[-2:] == [("read", 2), ("read", 3)]
    check_usable(core, clock, 1)


def test_nothing_is_built_upon_a_launch_that_failed() -> None:
    device = FakeDevice(n_slots=1, fail_launch={2: False})
    core, clock = engine(device)
    request_id = core.submit(request(5, n=20))
    record = run(core, clock)
    assert record.tokens(request_id) == alone(request(5), 64)[:2]  # what had been launched before still counts
    assert len(device.step_slots) == 3


def test_a_lost_cache_takes_the_memory_of_free_slots_with_it() -> None:
    device = FakeDevice(n_slots=2)
    core, clock = engine(device)
    core.submit(request(1, n=4))
    run(core, clock)
    device.fail_read[len(device.step_slots)] = True
    core.submit(request(9))
    run(core, clock)
    continued = request(1, *alone(request(1, n=4), 64), 5)
    request_id = core.submit(continued)
    record = run(core, clock)
    assert record.finish(request_id).n_cached == 0
    check_ends(record, request_id, continued, failed=False)


def test_a_lost_cache_is_not_blamed_on_those_who_come_after() -> None:
    """The step behind the one that lost the cache fails for the same reason; a new request must not be ended by it."""
    device = FakeDevice(n_slots=2, fail_read={2: True, 3: True})
    core, clock = engine(device)
    victim = core.submit(request(5, n=20))
    record = Record()
    while not any(isinstance(event, Finish) for event in record.events):
        record.events += core.step(clock.now_us).events
    heir = core.submit(request(6))
    run(core, clock, record)
    check_ends(record, victim, request(5, n=20), failed=True)
    check_ends(record, heir, request(6), failed=False)


def test_a_failed_step_of_a_cancelled_request_damages_its_slot_all_the_same() -> None:
    device = FakeDevice(n_slots=1, fail_read={2: False})
    core, clock = engine(device)
    request_id = core.submit(request(5, n=20))
    for _ in range(3):
        core.step(clock.now_us)
    core.cancel(request_id)
    assert run(core, clock).finish(request_id).reason is FinishReason.CANCELLED
    continued = request(5, *alone(request(5), 64)[:3], n=3)
    heir = core.submit(continued)
    record = run(core, clock)
    assert record.finish(heir).n_cached == 0
    check_ends(record, heir, continued, failed=False)


def test_unusable_logits_end_their_row_alone() -> None:
    device = FakeDevice(n_slots=3, bad_rows={(5, 1)})
    core, clock = engine(device)
    ids = [core.submit(request(n, 2)) for n in range(3)]
    record = run(core, clock)
    for n, request_id in enumerate(ids):
        check_ends(record, request_id, request(n, 2), failed=n == 1, error="the logits of this session were NaN or all equal")
    assert core.stats().failed_steps == 0
    check_usable(core, clock, 3)


def test_a_chunk_in_the_middle_of_a_prompt_fails_its_request() -> None:
    device = FakeDevice(n_slots=1, fail_read={1: False})
    core, clock = engine(device)
    request_id = core.submit(request(*range(40)))
    record = run(core, clock)
    check_ends(record, request_id, request(*range(40)), failed=True)
    assert record.tokens(request_id) == []
    check_usable(core, clock, 1)


def test_a_slot_that_cannot_be_cleared_fails_its_request_and_is_tried_again() -> None:
    device = FakeDevice(n_slots=1)
    core, clock = engine(device)
    core.submit(request(1, n=2))
    run(core, clock)
    device.fail_clear = {0}
    request_id = core.submit(request(7, n=2))
    check_ends(run(core, clock), request_id, request(7, n=2), failed=True, error="batched decode failed: clear failed")
    device.fail_clear = set()
    check_usable(core, clock, 1)
