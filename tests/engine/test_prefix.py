"""What prompts gain from those before them and beside them, seen from the requests: counts, copies, and always their own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.config import EngineConfig
from ds4jax.serving.engine.api import GenerateRequest, SamplingParams
from ds4jax.serving.engine.core import EngineCore
from ds4jax.serving.engine.prefix import common_prefix, plan_stops, reads_as, snapshot_interval
from tests.engine.fakes import FakeClock, FakeDevice, Record, alone, run

N_CTX = 256
SYSTEM = tuple(i % 89 for i in range(100))  # a prompt that conversations share
SPACING = 4


class House:
    """An engine over a scripted device, and what its requests have come to."""

    def __init__(self, texts: Sequence[bytes] = (), **device: Any) -> None:
        self.device, self.clock, self.record = FakeDevice(n_ctx=N_CTX, **{"n_snapshots": 16, **device}), FakeClock(), Record()
        assert self.device.prefill_buckets[0] == SPACING
        config = EngineConfig(slots=self.device.n_slots, ctx=N_CTX, prefill_quantum=16, mixed_prefill_quantum=4)
        self.core = EngineCore(self.device, config, self.clock, texts=texts)

    def ask(self, *prompt: int, n: int = 5, **more: Any) -> int:
        self.asked = GenerateRequest(prompt, n, SamplingParams(seed=0), **more)
        return self.core.submit(self.asked)

    def answer(self, *prompt: int, n: int = 5, **more: Any) -> tuple[int, list[int]]:
        """Ask and wait: tokens found in the cache, and the answer, which is checked."""
        request_id = self.ask(*prompt, n=n, **more)
        run(self.core, self.clock, self.record)
        tokens = self.record.tokens(request_id)
        assert tokens == alone(self.asked, N_CTX)
        return self.record.finish(request_id).n_cached, tokens

    @property
    def n_prefilled(self) -> int:
        return sum(len(tokens) for _, tokens in self.device.chunks)

    @property
    def reuses(self) -> dict[str, int]:
        return self.core.stats().reuses


# ---------------------------------------------------------------- one conversation
@pytest.mark.parametrize("n_prompt", [5, 17, 30, 31, 32, 33, 34, 97, 100])
def test_asking_again_computes_one_short_chunk_in_the_same_slot(n_prompt: int) -> None:
    house = House()
    assert house.answer(*SYSTEM[:n_prompt])[0] == 0
    assert n_prompt - SPACING <= house.answer(*SYSTEM[:n_prompt])[0] < n_prompt
    assert house.reuses == {"rewind": 1} and house.device.cleared == []
    assert len({slot for slot, _ in house.device.chunks}) == 1


def test_a_turn_whose_last_token_was_rendered_otherwise_goes_on_from_the_prompt_before_it() -> None:
    """As where a template drops the reasoning of earlier turns: the token that opened it is another one in the next prompt."""
    house = House()
    _, reply = house.answer(*SYSTEM, 90, n=30)
    n_cached, _ = house.answer(*SYSTEM, 91, *reply[20:], 1, 2, 3)
    assert n_cached == len(SYSTEM) and house.reuses == {"rewind": 1}


def test_an_edited_last_turn_goes_back_to_the_end_of_the_turn_before_it() -> None:
    house = House(n_slots=1)
    _, reply = house.answer(*SYSTEM)
    first = (*SYSTEM, *reply[:-1])  # the last token was never fed
    assert house.answer(*first, *range(20, 40))[0] == len(first)
    assert house.answer(*first, *range(60, 80))[0] == len(first)
    assert house.reuses == {"live": 1, "rewind": 1}


def test_a_long_prompt_that_parts_early_is_used_up_to_the_last_snapshot() -> None:
    house = House()
    house.answer(*SYSTEM)
    n_cached, _ = house.answer(*SYSTEM[:60], *range(20))
    interval = snapshot_interval(len(SYSTEM), 16)
    assert 60 - interval - 16 < n_cached <= 60


def test_where_prompts_have_parted_once_the_third_one_loses_nothing() -> None:
    house = House()
    house.answer(*SYSTEM, 1, 2, 3, 4, 5, 6)
    house.answer(*SYSTEM, 11, 12, 13, 14, 15, 16)
    assert house.answer(*SYSTEM, 21, 22, 23, 24, 25, 26)[0] == len(SYSTEM)


def test_a_mark_is_kept_from_the_first_time() -> None:
    house = House()
    house.answer(*SYSTEM, *range(7), marks=(len(SYSTEM),))
    assert house.answer(*SYSTEM, *range(30, 37))[0] == len(SYSTEM)


# ---------------------------------------------------------------- many conversations
def test_a_conversation_that_begins_like_another_leaves_it_alone() -> None:
    house = House()
    _, reply = house.answer(*SYSTEM, 1, 2, 3, 4, 5, marks=(len(SYSTEM),))
    house.answer(*SYSTEM, 11, 12, 13, 14, 15)
    assert house.reuses == {"fork": 1}
    ((source, target, n),) = house.device.restored
    assert source != target and n == len(SYSTEM)
    assert house.answer(*SYSTEM, 1, 2, 3, 4, 5, *reply[:-1], 7)[0] == len(SYSTEM) + 5 + len(reply) - 1
    assert house.reuses == {"fork": 1, "live": 1}


@pytest.mark.parametrize("n_slots", [4, 8])
def test_agents_that_come_together_compute_their_common_prompt_once(n_slots: int) -> None:
    house = House(n_slots=n_slots)
    asked = {house.ask(*SYSTEM, *range(i, i + 6)): house.asked for i in range(8)}
    run(house.core, house.clock, house.record)
    for request_id, request in asked.items():
        assert house.record.tokens(request_id) == alone(request, N_CTX)
    assert house.n_prefilled <= len(SYSTEM) + 8 * (6 + SPACING)
    assert sum(house.reuses.values()) == 7


def test_whoever_has_nothing_to_wait_for_passes() -> None:
    house = House(n_slots=3)
    first, second, third = house.ask(*SYSTEM, 1, 1), house.ask(*SYSTEM, 2, 2), house.ask(3, 3, 3)
    house.record.events += house.core.step(house.clock.now_us).events
    assert house.core.stats().n_waiting == 1  # the second
    run(house.core, house.clock, house.record)
    assert house.record.finish(second).n_cached == len(SYSTEM)
    assert {house.record.finish(i).n_cached for i in (first, third)} == {0}


@pytest.mark.parametrize("n_steps", [1, 3, 6])
def test_who_waits_for_another_prompt_goes_on_when_that_is_cancelled(n_steps: int) -> None:
    house = House(n_slots=2)
    first, second = house.ask(*SYSTEM, 1, 1), house.ask(*SYSTEM, 2, 2)
    for _ in range(n_steps):
        house.record.events += house.core.step(house.clock.now_us).events
    house.core.cancel(first)
    run(house.core, house.clock, house.record)
    assert house.record.tokens(second) == alone(house.asked, N_CTX)


def test_a_fork_reads_from_a_slot_that_is_busy() -> None:
    house = House(n_slots=2)
    busy = house.ask(*SYSTEM, n=60)
    while not house.record.tokens(busy):
        house.record.events += house.core.step(house.clock.now_us).events
    assert house.answer(*SYSTEM, 5, n=3)[0] >= len(SYSTEM) - SPACING and house.reuses == {"fork": 1}
    assert house.record.tokens(busy) == alone(GenerateRequest(SYSTEM, 60, SamplingParams(seed=0)), N_CTX)


def test_snapshots_of_a_slot_that_is_overwritten_are_not_used() -> None:
    house = House(n_slots=1)
    house.answer(*SYSTEM)
    house.answer(*range(30, 60))
    assert house.answer(*SYSTEM)[0] == 0


def test_a_fork_keeps_what_it_was_made_of_when_the_first_slot_is_given_away() -> None:
    house = House(n_slots=2)
    house.answer(*SYSTEM, 1, 2, 3, 4, marks=(len(SYSTEM),))
    house.answer(*SYSTEM, 5, 6, 7, 8)
    house.answer(*range(30, 60))  # takes the first slot
    assert house.answer(*SYSTEM, 9, 9)[0] == len(SYSTEM)


def test_a_conversation_that_was_cut_takes_its_own_place_and_not_anothers() -> None:
    house = House(n_slots=2)
    _, reply = house.answer(*SYSTEM[:40], conversation="a")  # left the longest ago
    house.answer(*range(40, 80), conversation="b")
    house.answer(*range(60, 80), conversation="b")
    assert house.answer(*SYSTEM[:40], *reply[:-1], 3, conversation="a")[0] == 40 + len(reply) - 1


# ---------------------------------------------------------------- limits and failures
def test_without_a_pool_only_whole_histories_are_continued() -> None:
    house = House(n_snapshots=0)
    _, reply = house.answer(*SYSTEM)
    assert house.answer(*SYSTEM)[0] == 0
    assert house.answer(*SYSTEM, *reply[:-1], 3)[0] == len(SYSTEM) + len(reply) - 1
    assert house.device.saved == []


def test_the_least_recently_used_snapshot_goes_first() -> None:
    house = House(n_snapshots=2)
    house.answer(*SYSTEM[:10])
    house.answer(*range(40, 60), marks=())
    house.answer(*SYSTEM[:10])  # used again
    house.answer(*range(70, 75))
    assert house.answer(*SYSTEM[:10])[0] == 9
    assert house.answer(*range(40, 60))[0] < 19


def test_a_system_prompt_outlives_the_turns_of_a_conversation() -> None:
    house = House(n_snapshots=4)
    turns, n = [*SYSTEM[:60]], 60
    for i in range(9):
        turns += [*range(i, i + 10)]
        turns += house.answer(*turns, marks=(n,))[1][:-1]
    assert house.answer(*SYSTEM[:60], *range(40, 60))[0] == n


def test_a_snapshot_that_cannot_be_taken_costs_nobody_anything() -> None:
    house = House(fail_save=True)
    house.answer(*SYSTEM)
    assert house.answer(*SYSTEM)[0] == 0
    assert house.core.stats().failed_steps > 0


def test_a_return_that_fails_ends_that_request_alone() -> None:
    house = House(n_slots=1)
    house.answer(*SYSTEM)
    house.device.fail_clear.add(0)
    broken = house.ask(*SYSTEM, 1)
    run(house.core, house.clock, house.record)
    assert house.record.finish(broken).error is not None
    house.device.fail_clear.clear()
    assert house.answer(*SYSTEM)[0] == 0


def test_what_a_failed_session_has_kept_is_not_used() -> None:
    house = House()
    house.device.bad_rows.add((8, 0))  # the first token of the answer
    broken = house.ask(*SYSTEM)
    run(house.core, house.clock, house.record)
    assert house.record.finish(broken).error is not None and house.device.saved
    assert house.answer(*SYSTEM)[0] == 0


def test_a_lost_cache_takes_the_snapshots_along() -> None:
    house = House()
    house.answer(*SYSTEM)
    house.device.fail_read[len(house.device.step_slots)] = True
    house.ask(9, 9)
    run(house.core, house.clock, house.record)
    assert house.answer(*SYSTEM)[0] == 0


# ---------------------------------------------------------------- arithmetic
@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)), st.integers(-1, 30))
def test_common_prefix(a: list[int], b: list[int], most: int) -> None:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b, most) == max(0, min(n, most))


@given(st.integers(1, 500), st.integers(0, 500), st.lists(st.integers(0, 600)), st.integers(1, 200))
def test_stops_lie_in_the_prompt_and_apart(n_prompt: int, n_cached: int, marks: list[int], spacing: int) -> None:
    stops = plan_stops(n_prompt, n_cached, marks, spacing)
    assert all(b - a >= spacing for a, b in zip((n_cached, *stops), stops, strict=False))
    assert all(stop < n_prompt for stop in stops)
    near = (n_cached, *stops)
    assert all(mark >= n_prompt or any(0 <= mark - at < spacing for at in near) for mark in marks if mark >= n_cached)


# ---------------------------------------------------------------- other tokens, same text
@given(st.lists(st.integers(0, 4), max_size=8), st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_reading_alike(history: list[int], prompt: list[int]) -> None:
    texts = [b"a", b"b", b"ab", b"ba", b"aab"]
    whole = b"".join(texts[i] for i in history)
    expected = [n for n in range(len(prompt)) if b"".join(texts[i] for i in prompt[:n]) == whole]
    n_shared = common_prefix(history, prompt, len(prompt) - 1)
    assert reads_as(history, prompt, n_shared, texts) == (expected[0] if expected else None)


def test_a_conversation_goes_on_in_its_slot_where_its_text_was_cut_otherwise() -> None:
    """The model wrote two tokens that the client's text has as one."""
    house = House(texts=[bytes([32 + i]) for i in range(96)] + [b"AB"])
    a, b, ab = ord("A") - 32, ord("B") - 32, 96
    house.answer(*SYSTEM, a, b, a, b, 5, n=1)
    request_id = house.ask(*SYSTEM, ab, ab, 5, 6, 7)
    run(house.core, house.clock, house.record)
    assert house.record.tokens(request_id) == alone(GenerateRequest((*SYSTEM, a, b, a, b, 5, 6, 7), 5, SamplingParams(seed=0)), N_CTX)
    finish = house.record.finish(request_id)
    assert (finish.n_prompt, finish.n_cached) == (len(SYSTEM) + 5, len(SYSTEM) + 3) and house.reuses == {"live": 1}
    assert house.core.stats().prompt_tokens == 2 * len(SYSTEM) + 10
