"""An engine with a folder of sessions, over a scripted device: what is saved when, what is loaded, and that nothing else changes."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.config import EngineConfig
from ds4jax.serving.engine import saves
from ds4jax.serving.engine.api import Finish, FinishReason, GenerateRequest, SamplingParams
from ds4jax.serving.engine.core import EngineCore
from ds4jax.serving.engine.disk import SavedSessions
from ds4jax.serving.engine.kvstore import Identity, KVPolicy, StoredEntry, TokenTexts, open_store
from ds4jax.serving.engine.kvstore.folder import Index
from tests.engine.fakes import PIECE, FakeClock, FakeDevice, Record, V, alone

N_CTX = 256
LONG = tuple(i * 7 % 89 for i in range(100))
OTHER = tuple(i * 5 % 89 for i in range(100))
POLICY = KVPolicy(
    min_tokens=16, cold_max_tokens=80, continued_interval_tokens=64, boundary_trim_tokens=4, boundary_align_tokens=32
)  # fmt: skip
NEVER_ON_THE_WAY = KVPolicy(min_tokens=16, cold_max_tokens=0, continued_interval_tokens=0)


class House:
    """An engine with a folder, and what its requests have come to."""

    def __init__(self, folder: Path, policy: KVPolicy = POLICY, texts: TokenTexts | None = None, **device: Any) -> None:
        opens_reasoning: Callable[[int], bool] = device.pop("opens_reasoning", lambda token: False)
        self.folder, self.warnings, self.closed = folder, list[str](), False
        self.device, self.clock, self.record = FakeDevice(n_ctx=N_CTX, **{"n_snapshots": 16, **device}), FakeClock(), Record()
        store = open_store(folder, Identity("model", "layout"), N_CTX, policy, texts=texts, warn=self.warnings.append)
        config = EngineConfig(slots=self.device.n_slots, ctx=N_CTX, prefill_quantum=16, mixed_prefill_quantum=4)
        saved = SavedSessions(store, opens_reasoning=opens_reasoning) if store else None
        self.core = EngineCore(self.device, config, self.clock, saved)

    def ask(self, *prompt: int, n: int = 5, **more: Any) -> int:
        self.asked = GenerateRequest(prompt, n, SamplingParams(seed=0), **more)
        return self.core.submit(self.asked)

    def step(self) -> int | None:
        step = self.core.step(self.clock.now_us)
        self.record.events.extend(step.events)
        return step.wait_until_us

    def run(self) -> None:
        """Step until nothing is left to do, the disk included."""
        deadline = time.monotonic() + 20
        while (until_us := self.step()) is not None:
            if until_us > self.clock.now_us:  # the threads of the disk know no clock of ours
                time.sleep(0.0005)
            self.clock.now_us = until_us
            assert time.monotonic() < deadline, "the engine does not come to rest"

    def answer(self, *prompt: int, n: int = 5, **more: Any) -> tuple[int, list[int]]:
        """Ask and wait: tokens found, and the answer, which is checked."""
        request_id = self.ask(*prompt, n=n, **more)
        self.run()
        tokens = self.record.tokens(request_id)
        assert tokens == alone(self.asked, N_CTX)
        return self.record.finish(request_id).n_cached, tokens

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.record.events.extend(self.core.close())

    @property
    def on_disk(self) -> dict[int, str]:
        """Lengths of the sessions on disk, and why they were saved."""
        return {entry.header.n_tokens: str(entry.header.reason) for entry in stored(self.folder) if entry.header is not None}


def stored(folder: Path) -> list[StoredEntry]:
    return Index(folder).scan()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()
    assert house.warnings == []


# ---------------------------------------------------------------- when
def test_the_beginning_of_a_new_prompt_is_saved_and_another_server_goes_on_from_it(house: House) -> None:
    house.answer(*LONG[:75])
    assert house.on_disk == {64: "cold"}
    other = House(house.folder)
    n_cached, _ = other.answer(*LONG[:75])
    assert n_cached == 64 and other.core.stats().reuses == {"disk": 1} and other.core.stats().reused_tokens == {"disk": 64}
    assert other.on_disk == {64: "cold"}
    assert sum(len(tokens) for _, tokens in other.device.chunks) == 75 - 64
    other.close()


def test_a_session_is_saved_on_its_way_through_prompt_and_answer(house: House) -> None:
    request_id = house.ask(*LONG, n=100)
    while not any(event.request_id == request_id and isinstance(event, Finish) for event in house.record.events):
        house.step()
        time.sleep(0.001)  # a save that nobody has begun to copy makes room for the next one
    house.run()
    assert house.on_disk == {64: "continued", 128: "continued", 192: "continued"}
    house.answer(*LONG, n=100)
    assert house.core.stats().saves == {"continued": 3}


def test_a_session_that_loses_its_slot_is_saved_first_and_comes_back(house: House) -> None:
    small = House(house.folder / "small", NEVER_ON_THE_WAY, n_slots=1)
    _, reply = small.answer(*LONG)
    assert small.on_disk == {}
    small.answer(*OTHER)
    n = len(LONG) + 4  # the last token was never fed
    assert small.on_disk == {n: "evict"}
    assert small.answer(*LONG, *reply[:-1], 3, 4)[0] == n
    assert small.on_disk == {n: "evict", len(OTHER) + 4: "evict"}
    assert small.core.stats().reuses == {"disk": 1}
    small.close()
    assert small.warnings == [] and len(stored(small.folder)) == 3


def test_what_is_on_disk_is_not_saved_again(house: House) -> None:
    for _ in range(3):
        house.answer(*LONG[:75], n=1)
    house.close()
    reopened = House(house.folder)
    reopened.answer(*LONG[:75], n=1)
    reopened.close()
    assert reopened.core.stats().saves in ({}, {"shutdown": 1})


def test_all_slots_are_saved_at_the_end(tmp_path: Path) -> None:
    house = House(tmp_path, NEVER_ON_THE_WAY)
    house.answer(*LONG)
    house.ask(*OTHER[:50], n=50)
    while len(house.record.events) < 30:
        house.step()
    house.close()
    assert len(LONG) + 4 in house.on_disk and set(house.on_disk.values()) == {"shutdown"} and len(house.on_disk) == 2
    other = House(tmp_path)
    n_left = next(n for n in house.on_disk if n != len(LONG) + 4)
    assert other.answer(*OTHER[:50], *alone(GenerateRequest(OTHER[:50], 60, SamplingParams(seed=0)), N_CTX))[0] == n_left
    other.close()


def test_a_thinking_conversation_is_saved_where_its_next_turn_will_part(tmp_path: Path) -> None:
    """Templates drop the thoughts of earlier turns, so the next prompt has another token where these began."""
    think, end_think = 90, 91
    house = House(tmp_path, NEVER_ON_THE_WAY, opens_reasoning=lambda token: token == think)
    house.answer(*LONG, think, n=30)
    house.close()
    assert house.on_disk == {len(LONG): "shutdown"}
    other = House(tmp_path)
    assert other.answer(*LONG, end_think, 1, 2, 3)[0] == len(LONG)
    other.close()


def test_short_sessions_are_neither_saved_nor_looked_for(house: House) -> None:
    house.answer(*LONG[:10])
    house.close()
    assert house.on_disk == {} and house.device.exported == []


def test_a_conversation_that_was_edited_is_not_saved_as_it_was(tmp_path: Path) -> None:
    house = House(tmp_path, NEVER_ON_THE_WAY, n_slots=1)
    house.answer(*LONG, conversation="mine")
    house.answer(*OTHER, conversation="mine")
    assert house.on_disk == {}
    house.answer(*LONG[:50], conversation="yours")
    assert house.on_disk == {len(OTHER) + 4: "evict"}
    house.close()


# ---------------------------------------------------------------- beside others
def test_a_save_takes_one_piece_a_step_while_others_decode(house: House) -> None:
    house.ask(1, 2, 3, n=150)
    house.ask(*LONG[:75], n=100)
    n_before = 0
    while house.step() is not None and house.core.stats().n_running:
        n = len(house.device.exported)
        if n > n_before:
            assert house.device.trace[-1][0] in ("read", "decode", "prefill")
            assert n - n_before <= (1 if "decode" in [kind for kind, _ in house.device.trace[-3:]] else 4)
        n_before = n
        time.sleep(0.0002)
        house.clock.now_us += 1
    house.run()
    assert 64 in house.on_disk and len(house.device.exported) >= 64 // PIECE


def test_nothing_waits_for_copies_that_do_not_arrive(house: House) -> None:
    house.device.copies_arrive = False
    request_id = house.ask(*LONG, n=20)
    for _ in range(200):
        house.step()
        time.sleep(0.0002)
    assert house.record.tokens(request_id) == alone(house.asked, N_CTX)
    assert house.on_disk == {} and len(house.device.exported) <= saves.MOST_IN_FLIGHT
    house.device.copies_arrive = True
    house.run()
    assert house.on_disk == {64: "continued"}


def test_a_slot_that_is_being_copied_is_not_given_away_but_not_for_ever(tmp_path: Path) -> None:
    house = House(tmp_path, NEVER_ON_THE_WAY, n_slots=1)
    house.answer(*LONG)
    house.device.copies_arrive = False
    house.ask(*OTHER)
    for _ in range(100):
        house.step()
        time.sleep(0.0002)
    assert house.core.stats().n_waiting == 1 and len(house.device.exported) == saves.MOST_IN_FLIGHT
    house.clock.now_us += saves.PATIENCE_US
    request_id = house.ask(9, 9, 9)
    for _ in range(200):
        house.step()
    house.device.copies_arrive = True
    house.run()
    assert house.record.tokens(request_id) == alone(house.asked, N_CTX)
    house.close()
    assert house.warnings == []
    other = House(tmp_path)  # its device would see rows of one session beside the state of another
    assert (
        other.answer(*LONG, 1, 2)[0] == 0
        and other.answer(*OTHER, *alone(GenerateRequest(OTHER, 4, SamplingParams(seed=0)), N_CTX), 1)[0] == 104
    )
    other.close()


def hold_reads(house: House, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let a house wait for what it reads from its folder until the event is set."""
    gate = threading.Event()
    store = house.core._disk.loads._store  # type: ignore[union-attr]
    load = store.load
    monkeypatch.setattr(store, "load", lambda entry: gate.wait(20) and load(entry))
    return gate


def test_who_waits_for_the_disk_is_passed_by_others(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.answer(*LONG[:75])
    other = House(house.folder)
    gate = hold_reads(other, monkeypatch)
    first, second = other.ask(*LONG[:75]), other.ask(1, 2, 3)
    for _ in range(50):
        other.step()
        other.clock.now_us += 1
    assert other.record.finish(second).reason is FinishReason.LENGTH and other.record.of(first) == []
    gate.set()
    other.run()
    assert other.record.finish(first).n_cached == 64
    other.close()


@pytest.mark.parametrize("cancel_at", [0, 1, 2, 3, 4, 6])
def test_cancelled_while_it_is_loaded(house: House, cancel_at: int) -> None:
    house.answer(*LONG[:75])
    other = House(house.folder, n_slots=1)
    request_id = other.ask(*LONG[:75])
    for _ in range(cancel_at):
        other.step()
        time.sleep(0.003)
    other.core.cancel(request_id)
    other.run()
    assert other.record.finish(request_id).reason is FinishReason.CANCELLED
    assert other.answer(*LONG[:75], 4, 5)[0] >= 64 and other.answer(*OTHER)[0] == 0
    other.close()


# ---------------------------------------------------------------- other tokens, same text
def test_a_conversation_is_found_by_its_text(tmp_path: Path) -> None:
    """Every token reads as a letter twice or as two tokens of it: the model wrote one way, the client's text is cut another way."""
    texts = TokenTexts([bytes([32 + i]) for i in range(V - 1)] + [b"AB"], frozenset())
    house = House(tmp_path, NEVER_ON_THE_WAY, texts)
    a, b, ab = ord("A") - 32, ord("B") - 32, V - 1
    house.answer(*LONG, a, b, a, b, 5, n=1)
    house.close()
    other = House(tmp_path, texts=texts)
    request_id = other.ask(*LONG, ab, ab, 5, 6, 7)
    other.run()
    finish = other.record.finish(request_id)
    assert (finish.n_prompt, finish.n_cached) == (len(LONG) + 5, len(LONG) + 3)
    assert other.record.tokens(request_id) == alone(GenerateRequest((*LONG, a, b, a, b, 5, 6, 7), 5, SamplingParams(seed=0)), N_CTX)
    other.close()


# ---------------------------------------------------------------- what goes wrong
def test_a_damaged_file_costs_a_warning_and_no_request(house: House) -> None:
    house.answer(*LONG[:75])
    (entry,) = stored(house.folder)
    data = bytearray(entry.path.read_bytes())
    data[-1] ^= 1
    entry.path.write_bytes(data)
    other = House(house.folder)
    assert other.answer(*LONG[:75])[0] == 0
    assert len(other.warnings) == 1 and "not a whole saved session" in other.warnings[0]
    other.close()


def test_arrays_of_another_shape_are_not_used(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.answer(*LONG[:75])
    other = House(house.folder, NEVER_ON_THE_WAY)
    monkeypatch.setattr(other.device, "session_parts", lambda n_tokens: ())
    assert other.answer(*LONG[:75])[0] == 0 and other.device.imported == []


def test_a_session_that_goes_wrong_behind_its_file_takes_that_along(house: House) -> None:
    house.answer(*LONG[:75])
    other = House(house.folder, NEVER_ON_THE_WAY)
    other.device.bad_rows = {(step, slot) for step in range(3) for slot in range(4)}
    request_id = other.ask(*LONG[:75])
    other.run()
    assert other.record.finish(request_id).reason is FinishReason.ERROR
    other.close()
    assert stored(house.folder) == []


def test_a_full_disk_costs_a_warning_and_no_request(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ds4jax.serving.engine.kvstore.files._pwrite", full)
    house.answer(*LONG)
    house.answer(*OTHER)
    assert house.on_disk == {} and house.core.stats().failed_saves == 2
    (warning,) = house.warnings
    assert "No space left on device" in warning
    house.warnings.clear()
    monkeypatch.undo()
    house.answer(*LONG[::-1])
    assert house.on_disk == {64: "continued"}


@pytest.mark.parametrize("step", ["room.Room.take", "files._pwrite", "files.EntryWriter.commit"])
def test_who_waits_for_a_slot_that_cannot_be_saved_gets_it_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Nothing else happens in an idle server that would wake its engine."""

    def read_only(*arguments: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    house = House(tmp_path, NEVER_ON_THE_WAY, n_slots=1)
    monkeypatch.setattr(f"ds4jax.serving.engine.kvstore.{step}", read_only)
    house.answer(*LONG)
    house.answer(*OTHER)
    assert house.core.stats().failed_saves == 1
    house.close()


@pytest.mark.parametrize("what", ["fail_export", "fail_copy"])
def test_who_waits_for_a_slot_whose_copy_fails_gets_it_all_the_same(tmp_path: Path, what: str) -> None:
    house = House(tmp_path, NEVER_ON_THE_WAY, n_slots=1)
    house.answer(*LONG)
    setattr(house.device, what, True)
    house.answer(*OTHER)
    house.close()


def test_a_folder_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    house = House(tmp_path / "file")
    assert house.answer(*LONG)[0] == 0
    assert len(house.warnings) == 1 and "sessions are not kept on disk" in house.warnings[0]
    house.close()


def test_a_disk_that_never_answers_costs_the_saved_session_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.answer(*LONG[:75])
    other = House(house.folder)
    gate = hold_reads(other, monkeypatch)
    request_id = other.ask(*LONG[:75])
    other.step()
    other.clock.now_us += 60_000_000
    other.run()
    assert other.record.finish(request_id).n_cached == 0
    gate.set()
    other.close()


@pytest.mark.parametrize("what", ["fail_export", "fail_copy"])
def test_a_copy_that_fails_is_not_saved(house: House, what: str) -> None:
    setattr(house.device, what, True)
    house.answer(*LONG)
    setattr(house.device, what, False)
    assert house.on_disk == {}
    house.answer(*OTHER)
    assert house.on_disk == {64: "continued"}


def test_an_import_that_fails_ends_its_request_alone(house: House) -> None:
    house.answer(*LONG[:75])
    other = House(house.folder)
    other.device.fail_import = True
    first, second = other.ask(*LONG[:75]), other.ask(1, 2, 3)
    other.run()
    assert other.record.finish(first).reason is FinishReason.ERROR and other.record.finish(second).reason is FinishReason.LENGTH
    other.device.fail_import = False
    assert other.answer(*LONG[:75])[0] == 64
    other.close()


@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("lost", [False, True])
def test_nothing_of_a_failed_step_is_ever_saved(tmp_path: Path, step: int, lost: bool) -> None:
    """Whatever is on disk afterwards is right: another server goes on from it, and its device checks rows and state."""
    house = House(tmp_path, fail_read={step: lost})
    house.ask(*LONG, n=40)
    house.ask(*OTHER[:70], n=40)
    house.run()
    house.close()
    other = House(tmp_path)
    other.answer(*LONG, n=40), other.answer(*OTHER[:70], n=40)
    other.close()


@settings(max_examples=25)
@given(st.data())
def test_any_traffic_gives_the_answers_of_an_engine_without_a_disk(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Two engines share a folder; prompts begin alike, come at once, are cancelled, and need more slots than there are."""
    folder = tmp_path_factory.mktemp("shared")
    policy = KVPolicy(
        min_tokens=8, cold_max_tokens=200, continued_interval_tokens=32, boundary_trim_tokens=2, boundary_align_tokens=8
    )  # fmt: skip
    houses = [House(folder, policy, n_slots=2, n_snapshots=data.draw(st.sampled_from([0, 3]), "snapshots")) for _ in range(2)]
    for _ in range(data.draw(st.integers(1, 6), "rounds")):
        house = houses[data.draw(st.integers(0, 1), "house")]
        asked = {}
        for _ in range(data.draw(st.integers(1, 4), "at once")):
            stem = data.draw(st.sampled_from([LONG, OTHER]), "stem")
            prompt = (*stem[: data.draw(st.integers(1, 90), "shared")], *data.draw(st.lists(st.integers(0, 80), max_size=3), "own"))
            request = GenerateRequest(prompt, data.draw(st.integers(1, 40), "n"), SamplingParams(seed=0))
            asked[house.core.submit(request)] = request
        cancelled = list(asked)[data.draw(st.integers(0, len(asked) - 1), "cancelled")] if data.draw(st.booleans(), "cancels") else None
        if cancelled is not None:
            for _ in range(data.draw(st.integers(0, 12), "steps")):
                house.step()
            house.core.cancel(cancelled)
        house.run()
        for request_id, request in asked.items():
            expected = alone(request, N_CTX)
            got = house.record.tokens(request_id)
            assert got == expected or (request_id == cancelled and got == expected[: len(got)])
    for house in houses:
        house.close()
        assert house.warnings == []
