"""Saving, finding and loading sessions on disk, and files that are not what they should be."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4jax.serving.engine.kvstore import Draft, Entry, Identity, KVPolicy, KVStore, Part, Reason, TokenTexts
from ds4jax.serving.engine.kvstore.files import read_entry, read_header
from ds4jax.serving.engine.kvstore.folder import Index, State
from ds4jax.serving.engine.kvstore.format import DTYPES, CorruptEntryError
from tests.engine.kvstore import NOW_S, contents, files, opened, save, session

PROMPT = list(range(100, 150))


def find(store: KVStore, tokens: list[int]) -> int:
    """Return how many tokens of a prompt are on disk."""
    found = store.find(tokens)
    return found.header.n_tokens if found and found.header else 0


def loaded(store: KVStore, tokens: list[int]) -> Entry | None:
    found = store.find(tokens)
    return store.load(found) if found else None


parts = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=5
).map(lambda all: tuple(Part(f"part{i}", dtype, shape) for i, (dtype, shape) in enumerate(all)))  # fmt: skip


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=40), st.binary(max_size=40), st.binary(max_size=40), parts,
    st.sampled_from(Reason), st.integers(0, 1 << 32).map(Random),
)  # fmt: skip
def test_what_is_saved_in_pieces_is_loaded_bit_for_bit(tokens, text, replay, parts, reason, random) -> None:  # type: ignore[no-untyped-def]
    bits = {part.name: np.frombuffer(random.randbytes(part.nbytes), DTYPES[part.dtype]) for part in parts}
    with TemporaryDirectory() as folder:
        store = opened(Path(folder))
        saving = store.save(Draft(tokens, parts, 1000, reason, text, replay))
        assert saving is not None
        left = {name: array for name, array in bits.items() if array.size}
        while left:  # arrays in turns, each in pieces of any size
            name = random.choice(sorted(left))
            n = random.randint(1, left[name].size)
            saving.put(name, left[name][:n])
            left[name] = left[name][n:]
            left = {name: array for name, array in left.items() if array.size}
        assert saving.finish().result(30)
        entry = loaded(store, [*tokens, 1])
        assert entry is not None
        assert (entry.tokens.tolist(), entry.text, entry.replay) == (tokens, text, replay)
        assert (entry.header.reason, entry.header.n_ctx, entry.header.created_s) == (reason, 1000, NOW_S)
        assert entry.header.parts == parts
        for part in parts:
            array = entry.arrays[part.name]
            assert (array.dtype, array.shape) == (DTYPES[part.dtype], part.shape)
            assert array.tobytes() == bits[part.name].tobytes()
        store.close()
        assert len(files(Path(folder))) == 1


some_tokens = st.lists(st.integers(0, 1), min_size=4, max_size=9)


@settings(max_examples=20)
@given(st.lists(some_tokens, max_size=5), st.lists(some_tokens, min_size=1, max_size=10))
def test_the_longest_beginning_is_found(saved: list[list[int]], prompts: list[list[int]]) -> None:
    with TemporaryDirectory() as folder:
        store = opened(Path(folder))
        for tokens in saved:
            save(store, tokens, 10, text=bytes(tokens))
        for prompt in prompts:
            expected = max((len(tokens) for tokens in saved if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens), default=0)
            assert find(store, prompt) == expected
            found = store.find_text(bytes(prompt))
            assert (found.header.n_text if found and found.header else 0) == expected
        store.close()


class TestLookup:
    def test_the_longest_beginning_with_a_token_left(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        for n in (4, 10, 20):
            assert save(store, PROMPT[:n])
        save(store, [*PROMPT[:20], 7, 7])
        assert [find(store, PROMPT[:n]) for n in (50, 20, 11, 10, 5, 4, 1)] == [20, 10, 10, 4, 4, 0, 0]
        assert find(store, [1, *PROMPT]) == 0

    def test_sessions_of_others_are_not_found(self, tmp_path: Path) -> None:
        save(opened(tmp_path), PROMPT[:20], text=b"abc")
        for identity in (Identity("another", "layout"), Identity("model", "another")):
            other = opened(tmp_path, identity=identity)
            assert other.find(PROMPT) is None and other.find_text(b"abcd") is None
            assert save(other, PROMPT[:20]) and find(other, PROMPT) == 20
        assert len(files(tmp_path)) == 3

    def test_too_long_or_too_short_for_this_server(self, tmp_path: Path) -> None:
        save(opened(tmp_path), PROMPT[:20])
        assert [find(opened(tmp_path, n_ctx=n), PROMPT) for n in (20, 21)] == [0, 20]
        assert find(opened(tmp_path, policy=KVPolicy(min_tokens=21)), PROMPT) == 0
        assert not save(opened(tmp_path, policy=KVPolicy(min_tokens=21)), PROMPT[:19])

    def test_by_text_the_longest_then_the_most_tokens(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        for tokens, text in (([1] * 4, b"system"), ([2] * 5, b"system user"), ([3] * 9, b"system user"), ([4] * 50, b"")):
            save(store, tokens, text=text)

        def tokens_of(text: bytes) -> int | None:
            found = store.find_text(text)
            return found.header.n_tokens if found and found.header else None

        assert [tokens_of(t) for t in (b"system user more", b"system user", b"systematic", b"system", b"sys")] == [9, 4, 4, None, None]

    def test_a_session_that_is_there_is_not_written_again_but_for_new_text_or_calls(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        assert save(store, PROMPT, text=b"a", replay=b"calls")
        before = files(tmp_path)[0].stat().st_ino
        again = store.save(session(PROMPT, text=b"a", replay=b"calls", reason=Reason.EVICT))
        assert again
        while again.wanted:
            pass
        again.put("x", np.zeros(300, np.uint8))  # no use, no harm
        assert not again.finish().result(30) and files(tmp_path)[0].stat().st_ino == before
        assert save(store, PROMPT, text=b"a", replay=b"other calls")
        assert [*store.replay_maps()] == [b"other calls"]
        assert len(files(tmp_path)) == 1

    def test_a_hit_is_counted_where_others_see_it(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        save(store, PROMPT)
        later = opened(tmp_path, clock=lambda: NOW_S + 60)
        for _ in range(2):
            assert loaded(later, [*PROMPT, 1])
        found = store.find([*PROMPT, 1])
        assert found and (found.usage.hits, found.usage.last_used_s) == (2, NOW_S + 60)

    def test_fetch_what_covers_most_of_a_prompt(self, tmp_path: Path) -> None:
        """Token i reads as i letters, so that [1, 2] and [3] are one text, of which [2, 1, 1] has the first part."""
        texts = TokenTexts([b"x" * i for i in range(20)], frozenset({19}))
        store = opened(tmp_path, texts=texts)
        for tokens in ([4, 4, 4, 4], [4, 4, 8, 2, 2]):
            save(store, tokens, text=texts.read(tokens).text)
        for prompt, beyond, expected in (
            ([4, 4, 4, 4, 9], 0, ([4, 4, 4, 4], 4)),  # the longer one ends within its last token
            ([4, 4, 4, 4, 4, 9], 0, ([4, 4, 8, 2, 2], 5)),
            ([8, 8, 4, 9], 2, ([4, 4, 8, 2, 2], 3)),
            ([8, 8, 4, 9], 3, None),
            ([8, 8, 4], 0, ([4, 4, 4, 4], 2)),  # a token must be left to feed
            ([7, 10, 9], 0, None),
        ):
            found = store.fetch(prompt, beyond).result(30)
            assert (found and (found.entry.tokens.tolist(), found.n_covered)) == expected
            assert not found or found.entry.arrays["x"].tobytes() == contents(session(found.entry.tokens.tolist()))["x"].tobytes()

    def test_text_that_looks_like_a_special_token_is_none(self) -> None:
        texts = TokenTexts([b"<eos>", b"<eos>"], frozenset({1}))
        assert texts.read([0]).text != texts.read([1]).text

    def test_a_session_that_another_server_deleted(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        save(store, PROMPT)
        found = store.find([*PROMPT, 1])
        assert found
        assert opened(tmp_path).discard(PROMPT).result(30)
        assert store.load(found) is None and store.find([*PROMPT, 1]) is None

    def test_a_session_that_is_to_go_is_gone_when_the_store_is_closed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = opened(tmp_path)
        save(store, PROMPT)
        reading, released = threading.Semaphore(0), threading.Event()

        def slow_read(path: Path) -> None:
            reading.release()
            released.wait(30)
            raise FileNotFoundError(path)

        monkeypatch.setattr("ds4jax.serving.engine.kvstore.store.read_entry", slow_read)
        for _ in range(16):  # more than there are threads
            store.fetch([*PROMPT, 1])
        assert reading.acquire(timeout=30)
        store.discard(PROMPT)
        store.close()
        released.set()
        assert files(tmp_path) == []


class TestSaving:
    def test_pieces_that_were_not_announced(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        saving = store.save(session(PROMPT, 10))
        assert saving
        for name, piece in (("y", np.zeros(1, np.uint8)), ("x", np.zeros(1, np.int8)), ("x", np.zeros(11, np.uint8))):
            with pytest.raises(ValueError, match=f"a piece of {name}"):
                saving.put(name, piece)
        with pytest.raises(ValueError, match="bytes are missing: {'x': 10}"):
            saving.finish()
        store.close()
        assert files(tmp_path) == []

    def test_given_up(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        saving = store.save(session(PROMPT, 10))
        assert saving and store.save(session(PROMPT, 10)) is None  # it is being written
        saving.put("x", np.zeros(5, np.uint8))
        saving.cancel()
        with pytest.raises(ValueError, match="has ended"):
            saving.put("x", np.zeros(5, np.uint8))
        assert save(store, PROMPT)
        left_open = store.save(session(PROMPT[1:], 10))
        store.close()
        assert left_open and left_open.ended
        assert len(files(tmp_path)) == 1

    def test_nothing_is_seen_before_the_end(self, tmp_path: Path) -> None:
        store = opened(tmp_path)
        saving = store.save(session(PROMPT, 10))
        assert saving
        saving.put("x", np.zeros(10, np.uint8))
        assert find(store, [*PROMPT, 1]) == 0
        assert saving.finish().result(30) and saving.backlog_bytes == 0
        assert find(store, [*PROMPT, 1]) == 50

    def test_the_folder_is_its_owners_alone(self, tmp_path: Path) -> None:
        store = opened(tmp_path / "a" / "b")
        save(store, PROMPT)
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "a" / "b").iterdir())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """A file and its name."""
    folder = tmp_path_factory.mktemp("good")
    assert save(opened(folder), PROMPT, 100, text=b"some text", replay=b"some calls")
    (path,) = files(folder)
    return path.name, path.read_bytes()


class TestDamage:
    """One file, damaged everywhere: never used, never fatal."""

    def test_any_bit(self, good: tuple[str, bytes], tmp_path: Path) -> None:
        name, data = good
        path = tmp_path / name
        path.write_bytes(data)
        for i in range(len(data)):
            with path.open("r+b") as file:  # in place: files that are written anew are slow
                file.seek(i - 1 if i else 0)
                file.write(data[i - 1 : i] + bytes([data[i] ^ 1 << i % 8]))
            (listed,) = Index(tmp_path).scan()
            if 32 <= i < 64:  # the record of its use, which does not matter
                assert listed.usage.last_used_s is None and read_entry(path).text == b"some text"
            elif 8 <= i < 12:
                assert listed.state is State.OTHER_VERSION
            else:
                with pytest.raises(CorruptEntryError):
                    read_entry(path)

    def test_any_length(self, good: tuple[str, bytes], tmp_path: Path) -> None:
        name, data = good
        path = tmp_path / name
        path.write_bytes(data)
        for n in reversed(range(len(data))):
            os.truncate(path, n)
            with pytest.raises(CorruptEntryError):
                read_header(path)
        path.write_bytes(data + b"\0")
        with pytest.raises(CorruptEntryError, match="bytes, .* were written"):
            read_header(path)

    @pytest.mark.parametrize("damage", ["header", "contents", "length", "name", "empty"])
    def test_it_is_deleted_with_one_warning(self, good: tuple[str, bytes], tmp_path: Path, damage: str) -> None:
        name, data = good
        if damage == "name":
            name = "0" * 39 + "1.d4kv"
        damaged = {"header": b"x" + data[1:], "contents": data[:-1] + b"x", "length": data[:-1], "empty": b""}.get(damage, data)
        warnings: list[str] = []
        store = opened(tmp_path, warnings)
        (tmp_path / name).write_bytes(damaged)
        found = store.find([*PROMPT, 1]) or next(iter(Index(tmp_path).scan()), None)
        assert found is None or store.load(found) is None
        assert files(tmp_path) == [] and find(store, [*PROMPT, 1]) == 0
        (warning,) = warnings
        assert name in warning and "not a whole saved session" in warning and "deleted" in warning
        assert save(store, PROMPT) and find(store, [*PROMPT, 1]) == 50

    def test_foreign_files_are_left_alone(self, good: tuple[str, bytes], tmp_path: Path) -> None:
        name, data = good
        foreign = ["README", "0" * 40 + ".kv", name + ".bak", "x" + name]
        for other in foreign:
            (tmp_path / other).write_bytes(data)
        (tmp_path / ("0" * 40 + ".d4kv")).mkdir()
        store = opened(tmp_path, policy=KVPolicy(space_mb=1, min_tokens=4))
        assert find(store, [*PROMPT, 1]) == 0 and save(store, PROMPT) and find(store, [*PROMPT, 1]) == 50
        assert {path.name for path in files(tmp_path)} >= {*foreign, name}

    def test_another_version_is_not_used_until_room_is_needed(self, good: tuple[str, bytes], tmp_path: Path) -> None:
        name, data = good
        (tmp_path / name).write_bytes(data[:8] + b"\2" + data[9:] + bytes(600 << 10))
        warnings: list[str] = []
        store = opened(tmp_path, warnings, policy=KVPolicy(space_mb=1, min_tokens=4))
        assert find(store, [*PROMPT, 1]) == find(store, [*PROMPT, 1]) == 0
        assert (tmp_path / name).exists() and len(warnings) == 1 and "version 2" in warnings[0]
        assert save(store, PROMPT[:9], 600 << 10)
        assert not (tmp_path / name).exists() and find(store, PROMPT) == 9
