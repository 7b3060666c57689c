"""When sessions are saved, and which go when room is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.errors import ConfigError
from ds4jax.serving.engine.kvstore import KVPolicy, Reason
from ds4jax.serving.engine.kvstore.folder import Index
from ds4jax.serving.engine.kvstore.policy import (
    HALF_LIFE_S,
    Standing,
    chat_anchor,
    choose_victims,
    cold_position,
    continued_due,
    next_continued,
    score,
    worth_saving,
)
from tests.engine.kvstore import NOW_S, Identity, files, opened, pieces, save, session, total_bytes

DEFAULTS = KVPolicy()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"space_mb": 0}, "--kv-disk-space-mb: got 0, expected at least 1"),
        ({"min_tokens": 0}, "--kv-cache-min-tokens: got 0, expected at least 1"),
        ({"cold_max_tokens": -1}, "--kv-cache-cold-max-tokens: got -1, expected at least 0"),
        ({"cold_max_tokens": 100}, "--kv-cache-cold-max-tokens: got 100, expected 0 .* at least --kv-cache-min-tokens 512"),
        ({"continued_interval_tokens": -5}, "--kv-cache-continued-interval-tokens: got -5"),
        ({"boundary_trim_tokens": -1}, "--kv-cache-boundary-trim-tokens: got -1"),
        ({"boundary_align_tokens": 0}, "--kv-cache-boundary-align-tokens: got 0, expected at least 1"),
    ],
)
def test_impossible_knobs(knobs: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVPolicy(**knobs)


@pytest.mark.parametrize(
    ("n_prompt", "anchor", "policy", "expected"),
    [
        (511, None, DEFAULTS, None),
        (512, None, DEFAULTS, None),  # one token must be left
        (513, None, DEFAULTS, 512),
        (2048, None, DEFAULTS, 2047),
        (2080, None, DEFAULTS, 2048),
        (2079, None, DEFAULTS, 2078),
        (30_000, None, DEFAULTS, 28_672),
        (30_001, None, DEFAULTS, None),
        (5000, 700, DEFAULTS, 700),
        (5000, 511, DEFAULTS, 4096),
        (5000, 512, DEFAULTS, 512),
        (5000, None, KVPolicy(cold_max_tokens=0), None),
        (4096, None, KVPolicy(boundary_trim_tokens=0), 4095),
        (3000, None, KVPolicy(min_tokens=2500), 2999),
    ],
)
def test_cold(n_prompt: int, anchor: int | None, policy: KVPolicy, expected: int | None) -> None:
    assert cold_position(n_prompt, anchor, policy) == expected


def test_the_anchor_is_the_last_user_turn_before_the_first_answer() -> None:
    user, assistant = 1, 2
    for prompt, expected in (
        ([0, 9, user, 8, assistant], 2),
        ([0, user, 8, user, 8, assistant, user, 8, assistant], 3),
        ([0, user, 8], 1),
        ([0, assistant, user], None),
        ([], None),
    ):
        assert chat_anchor(prompt, user, assistant) == expected


def test_continued() -> None:
    assert DEFAULTS.continued_step == 10_240
    due = [n for n in range(0, 31_000) if continued_due(n, 0, DEFAULTS)]
    assert due == [10_240, 20_480, 30_720]
    assert not continued_due(10_240, 10_240, DEFAULTS)  # a cold save was there already
    assert not any(continued_due(n, 0, KVPolicy(continued_interval_tokens=0)) for n in range(21_000))
    short = KVPolicy(min_tokens=100, continued_interval_tokens=32, boundary_align_tokens=16)
    assert [n for n in range(170) if continued_due(n, 0, short)] == [128, 160]


@given(st.integers(0, 50_000), st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_the_next_continued_save_is_the_next_that_is_due(n_live: int, interval: int, align: int, least: int) -> None:
    policy = KVPolicy(min_tokens=least, continued_interval_tokens=interval, boundary_align_tokens=align)
    step = policy.continued_step
    expected = next((n for n in range((n_live // step + 1) * step, 100_000, step) if continued_due(n, 0, policy)), None) if step else None
    assert next_continued(n_live, policy) == expected


def test_evict_and_shutdown() -> None:
    assert [worth_saving(n, DEFAULTS) for n in (0, 511, 512)] == [False, False, True]


def a_file(**values: object) -> Standing:
    return Standing(**({"key": "k", "size_bytes": 1000, "n_tokens": 500, "reason": Reason.CONTINUED, "last_used_s": NOW_S} | values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (a_file(), 0.5),
        (a_file(hits=3), 2.0),
        (a_file(hits=3, last_used_s=NOW_S - HALF_LIFE_S), 1.25),
        (a_file(hits=3, last_used_s=NOW_S + 100), 2.0),  # the clock of another host
        (a_file(hits=3, last_used_s=NOW_S - 9 * HALF_LIFE_S), 0.5),  # forgotten
        (a_file(hits=3, last_used_s=None), 0.5),
        (a_file(reason=Reason.COLD), 1.0),
        (a_file(reason=Reason.EVICT, hits=1), 2.0),
        (a_file(reason=Reason.SHUTDOWN), 1.0),
        (a_file(extended=True), 0.025),
        (a_file(extended=True, hits=1), 1.0 * (0.05 + 0.225)),
        (a_file(extended=True, reason=Reason.COLD), 1.0),
        (a_file(long=True, reason=Reason.EVICT), 1.0),  # nobody has continued it yet
        (a_file(long=True, reason=Reason.EVICT, hits=1), 1.0 * (0.05 + 0.225)),
        (a_file(reason=None), -1.0),
    ],
)
def test_score(file: Standing, expected: float) -> None:
    assert score(file, NOW_S) == pytest.approx(expected)


def test_victims() -> None:
    rank = [
        a_file(key="other version", reason=None, n_tokens=0),
        a_file(key="extended", extended=True),
        a_file(key="older", last_used_s=NOW_S - 5),
        a_file(key="newer"),
        a_file(key="cold", reason=Reason.COLD),
        a_file(key="hit", hits=9),
    ]
    for n in range(7):
        assert [f.key for f in choose_victims(reversed(rank), 6000 - 1000 * n, NOW_S)] == [f.key for f in rank[:n]]
    assert [f.key for f in choose_victims(rank, 5999, NOW_S)] == ["other version"]
    assert choose_victims([], 0, NOW_S) == []


KIB = 1024
ONE_MIB = KVPolicy(space_mb=1, min_tokens=4)


def saved_lengths(folder: Path) -> list[int]:
    return sorted(entry.header.n_tokens for entry in Index(folder).scan() if entry.header)


class TestBudget:
    def test_the_least_worth_goes_first(self, tmp_path: Path) -> None:
        store = opened(tmp_path, policy=ONE_MIB)
        base = list(range(500))
        save(store, base[:100], 300 * KIB, reason=Reason.CONTINUED)
        save(store, [9] * 110, 300 * KIB, reason=Reason.CONTINUED)
        save(store, [8] * 90, 300 * KIB, reason=Reason.COLD)
        # The first is worth more than the second, but for a session that goes on from it.
        assert save(store, base[:200], 300 * KIB, reason=Reason.CONTINUED)
        assert saved_lengths(tmp_path) == [90, 110, 200]
        found = store.find([*[9] * 110, 1])
        assert found and store.load(found)
        assert save(store, [7] * 300, 300 * KIB)
        assert saved_lengths(tmp_path) == [110, 200, 300]

    def test_what_does_not_fit_at_all_evicts_nobody(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        store = opened(tmp_path, warnings, policy=ONE_MIB)
        save(store, [9] * 100, 300 * KIB)
        for n in (500, 501):
            assert not save(store, [1] * n, 1024 * KIB)
        assert saved_lengths(tmp_path) == [100]
        (warning,) = warnings
        assert "--kv-disk-space-mb 1" in warning and "500 tokens" in warning and "raise it" in warning

    def test_a_smaller_budget_holds_from_the_start(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        for i in range(5):
            save(store, [i] * (100 + i), 300 * KIB)
        opened(tmp_path, policy=ONE_MIB)
        assert saved_lengths(tmp_path) == [102, 103, 104]

    def test_sessions_of_other_models_count(self, tmp_path: Path) -> None:
        save(opened(tmp_path, identity=Identity("another", "layout")), [9] * 100, 600 * KIB)
        assert save(opened(tmp_path, policy=ONE_MIB), [1] * 10, 600 * KIB)
        assert len(files(tmp_path)) == 1

    def test_what_is_being_written_counts(self, tmp_path: Path) -> None:
        warnings: list[str] = []
        first, second = opened(tmp_path, policy=ONE_MIB), opened(tmp_path, warnings, policy=ONE_MIB)
        draft = session([1] * 10, 600 * KIB)
        saving = first.save(draft)
        assert saving
        for name, piece in pieces(draft, 100 * KIB):
            saving.put(name, piece)
        while saving.backlog_bytes:
            pass
        assert not save(second, [2] * 10, 600 * KIB)
        assert "while others are being written" in warnings[0]
        assert total_bytes(tmp_path) <= 1 << 20
        assert saving.finish().result(30)
        assert save(second, [2] * 10, 600 * KIB)
        assert saved_lengths(tmp_path) == [10] and total_bytes(tmp_path) <= 1 << 20


@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(1, 700), st.integers(4, 400), st.sampled_from(Reason)), min_size=1, max_size=6))
def test_the_budget_is_never_exceeded(tmp_path_factory: pytest.TempPathFactory, sessions: list[tuple[int, int, Reason]]) -> None:
    folder = tmp_path_factory.mktemp("budget")
    store = opened(folder, [], policy=ONE_MIB)
    for i, (kib, n, reason) in enumerate(sessions):
        assert save(store, [i] * n, kib * KIB, reason=reason)
        assert total_bytes(folder) <= 1 << 20
        assert store.find([i] * (n + 1))
    store.close()
