"""Sessions on disk: find one that begins a prompt, load it, save one.

Nothing here can fail a request: whatever is wrong with the folder or a file is told once in a warning, and a lookup finds nothing or a
save is skipped. The folder may be shared by servers of one host or of a shared file system, and by different models.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds4jax.config import KVPolicy
from ds4jax.serving.engine.kvstore.files import SUFFIX, EntryWriter, read_entry, read_header, read_replay, record_use
from ds4jax.serving.engine.kvstore.folder import Index, StoredEntry
from ds4jax.serving.engine.kvstore.format import (
    CorruptEntryError,
    Entry,
    Header,
    OtherVersionError,
    Part,
    Reason,
    Section,
    digest_of,
)
from ds4jax.serving.engine.kvstore.keys import Identity, as_tokens, entry_key, prefix_keys, prefix_text_digests
from ds4jax.serving.engine.kvstore.room import Room
from ds4jax.serving.engine.kvstore.saving import Saving
from ds4jax.serving.engine.kvstore.texts import TokenTexts
from ds4jax.serving.engine.kvstore.trouble import Trouble, Warn

logger = logging.getLogger("ds4jax.kvstore")

_READERS = 4  # a short session need not wait for a long one


@dataclass(frozen=True)
class Draft:
    """A session that is to be saved, but for the contents of its arrays.

    tokens: all that were fed. parts: the arrays, live rows alone. n_ctx: tokens its slot holds. text: what clients send to continue
    the session (the tokens' own text, or a transcript without reasoning); b"" if it is found by its tokens alone.
    replay: the tool-replay map, opaque here.
    """

    tokens: Sequence[int] | np.ndarray
    parts: tuple[Part, ...]
    n_ctx: int
    reason: Reason
    text: bytes = b""
    replay: bytes = b""


@dataclass(frozen=True)
class Found:
    """A saved session to continue. n_covered: tokens of the prompt that it stands for: all its own, or others of the same text."""

    entry: Entry
    n_covered: int


def open_store(
    folder: Path,
    identity: Identity,
    n_ctx: int,
    policy: KVPolicy | None = None,
    *,
    texts: TokenTexts | None = None,
    warn: Warn = logger.warning,
    clock: Callable[[], float] = time.time,
) -> KVStore | None:
    """Open the folder of saved sessions, making it (for its owner alone) if need be; None, after a warning, if that is impossible.

    n_ctx: tokens a slot holds here. texts: of the model's tokens; without them sessions are found by their tokens alone.
    clock: s since 1970. What killed servers left half written is deleted, and so is what exceeds the budget.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.scandir(folder).close()
    except OSError as error:
        warn(f"--kv-disk-dir {folder}: {error.strerror}; sessions are not kept on disk. Name a folder that this user may write")
        return None
    return KVStore(folder, identity, n_ctx, policy or KVPolicy(), texts, warn, clock)


class KVStore:
    """The saved sessions that one server shares with others. `open_store` makes it.

    fetch and save return at once and leave the disk to threads of the store. What reads at once may be called from any thread; saves
    are for one.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        n_ctx: int,
        policy: KVPolicy,
        texts: TokenTexts | None,
        warn: Warn,
        clock: Callable[[], float],
    ) -> None:
        self._folder, self._identity, self._n_ctx, self.policy, self._clock = folder, identity, n_ctx, policy, clock
        self.texts = texts
        self._trouble = Trouble(folder, warn)
        self._index = Index(folder)
        self._room = Room(folder, self._index, identity, policy, clock, self._trouble)
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="kv-save")
        self._reading = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-load")
        self._savings: dict[str, Saving] = {}
        self._deletions: dict[Path, Future[bool]] = {}
        try:
            self._room.tidy()
        except OSError as error:
            self._trouble.cannot_save(error)

    # ---------------------------------------------------------------- lookup
    def find(self, tokens: Sequence[int] | np.ndarray) -> StoredEntry | None:
        """Return the longest saved session whose tokens begin these, with at least one of them left to feed."""
        tokens = as_tokens(tokens)
        usable = [(header.n_tokens, entry) for entry, header in self._usable() if header.n_tokens < len(tokens)]
        keys = prefix_keys(self._identity, tokens, (n for n, _ in usable))
        matching = {n: entry for n, entry in usable if entry.key == keys[n]}
        return matching[max(matching)] if matching else None

    def find_text(self, text: bytes, ends: np.ndarray | None = None) -> StoredEntry | None:
        """Return the saved session with the longest text that begins this one, something being left to encode; then the most tokens.

        ends: the only lengths of a text that are of use.
        """
        usable = [(header, entry) for entry, header in self._usable() if 0 < header.n_text < len(text)]
        if ends is not None:
            useful = set(ends.tolist())
            usable = [(header, entry) for header, entry in usable if header.n_text in useful]
        digests = prefix_text_digests(text, (header.n_text for header, _ in usable))
        matching = {(h.n_text, h.n_tokens): entry for h, entry in usable if h.text_digest == digests[h.n_text]}
        return matching[max(matching)] if matching else None

    def load(self, entry: StoredEntry) -> Entry | None:
        """Read a session that was found and count the hit; None if it is gone or damaged. Takes as long as reading the file does."""
        try:
            loaded = read_entry(entry.path)
        except (CorruptEntryError, OtherVersionError, OSError) as error:
            self._trouble.cannot_load(entry.path, error)
            return None
        record_use(entry.path, self._clock())
        return loaded

    def fetch(self, tokens: Sequence[int] | np.ndarray, beyond: int = 0) -> Future[Found | None]:
        """Find and load the session to continue a prompt with, on a thread of the store: by its text, or else by its tokens.

        beyond: tokens that the server has already, so that nothing shorter is worth loading.
        """

        def read() -> Found | None:
            for entry, n_covered in self._candidates(as_tokens(tokens)):
                if n_covered > beyond and (loaded := self.load(entry)) is not None:
                    return Found(loaded, n_covered)
            return None

        return self._reading.submit(read)

    def _candidates(self, tokens: np.ndarray) -> Iterator[tuple[StoredEntry, int]]:
        """Yield what a prompt may go on from, and how many of its tokens that covers, the most first.

        Sessions of the same tokens have the same text, so looking for the text finds as much at least.
        """
        if self.texts is not None:
            reading = self.texts.read(tokens.tolist())
            entry = self.find_text(reading.text, reading.ends)
            if entry is not None and entry.header is not None and (n := reading.n_tokens_of(entry.header.n_text)) is not None:
                yield entry, n
        entry = self.find(tokens)
        if entry is not None and entry.header is not None:
            yield entry, entry.header.n_tokens

    def discard(self, tokens: Sequence[int] | np.ndarray) -> Future[bool]:
        """Delete the session of exactly these tokens, on a thread of the store, for its state turned out to be of no use."""
        path = self._folder / (entry_key(self._identity, tokens) + SUFFIX)
        deletion = self._reading.submit(lambda: self._trouble.delete(path))
        self._deletions = {**{p: d for p, d in self._deletions.items() if not d.done()}, path: deletion}
        return deletion

    def replay_maps(self) -> Iterator[bytes]:
        """Read the tool-replay maps of all sessions that this server could continue, those used last first."""
        with_map = [entry for entry, header in self._usable() if header.n_replay]
        for entry in sorted(with_map, key=lambda entry: -(entry.usage.last_used_s or 0.0)):
            try:
                yield read_replay(entry.path)
            except (CorruptEntryError, OtherVersionError, OSError) as error:
                self._trouble.cannot_load(entry.path, error)

    def _usable(self) -> list[tuple[StoredEntry, Header]]:
        """List the sessions that this server could continue."""
        found = [(entry, entry.header) for entry in self._scan() if entry.header is not None]
        return [
            (entry, header)
            for entry, header in found
            if (header.model, header.layout) == (self._identity.model, self._identity.layout)
            and self.policy.min_tokens <= header.n_tokens < self._n_ctx
        ]

    def _scan(self) -> list[StoredEntry]:
        try:
            return self._trouble.sort_out(self._index.scan())
        except OSError as error:
            self._trouble.cannot_scan(error)
            return []

    # ---------------------------------------------------------------- saving
    def save(self, draft: Draft) -> Saving | None:
        """Begin to save a session; None if it is too short or too large, or is being saved.

        One that is on disk under this text and with this replay map is not written again, which `Saving.wanted` tells soon.
        """
        self._savings = {key: saving for key, saving in self._savings.items() if not saving.ended}
        tokens = as_tokens(draft.tokens)
        key = entry_key(self._identity, tokens)
        header = self._header(draft, tokens)
        if len(tokens) < self.policy.min_tokens or key in self._savings:
            return None
        if header.file_bytes > self.policy.budget_bytes:
            self._trouble.once(
                "size",
                f"--kv-disk-space-mb {self.policy.space_mb}: a session of {len(tokens)} tokens takes {header.file_bytes >> 20} MiB on "
                "disk and is not saved; raise it",
            )
            return None

        def start() -> EntryWriter | None:
            if self._has(key, header):
                return None
            writer = EntryWriter(*self._room.take(header.file_bytes, tokens), self._folder / (key + SUFFIX), header)
            try:
                for name, data in (("tokens", tokens.tobytes()), ("text", draft.text), ("replay", draft.replay)):
                    writer.write(name, memoryview(data))
            except OSError:
                writer.abort()
                raise
            return writer

        self._savings[key] = saving = Saving(self._writing, header.parts, start, self._trouble.cannot_save)
        return saving

    def save_all(self, draft: Draft, pieces: Iterable[tuple[str, np.ndarray]]) -> Future[bool]:
        """Save a session whose arrays (name, piece) are at hand; the future tells whether it was written."""
        saving = self.save(draft)
        if saving is None:
            skipped: Future[bool] = Future()
            skipped.set_result(False)
            return skipped
        for name, piece in pieces:
            saving.put(name, piece)
        return saving.finish()

    def close(self, within_s: float | None = None) -> None:
        """Wait for what is being written, at most so long; saves that were never finished leave nothing behind."""
        for saving in self._savings.values():
            saving.cancel()
        self._reading.shutdown(wait=False, cancel_futures=True)
        for path, deletion in self._deletions.items():
            if deletion.cancelled() or not deletion.done():  # it stood behind reads; the next server must not go on from such a session
                self._trouble.delete(path)
        done = self._writing.submit(lambda: None)  # the queue is in order
        try:
            done.result(within_s)
        except TimeoutError:
            for saving in self._savings.values():
                saving.abandon()
        self._writing.shutdown()

    def _header(self, draft: Draft, tokens: np.ndarray) -> Header:
        lead = (
            Section(Part("tokens", "uint32", tokens.shape)),
            Section(Part("text", "uint8", (len(draft.text),)), digest_of(draft.text)),
            Section(Part("replay", "uint8", (len(draft.replay),)), digest_of(draft.replay)),
        )
        sections = lead + tuple(Section(part) for part in draft.parts)
        return Header(self._identity.model, self._identity.layout, draft.n_ctx, draft.reason, self._clock(), sections)

    def _has(self, key: str, wanted: Header) -> bool:
        try:
            found, _ = read_header(self._folder / (key + SUFFIX))
        except (CorruptEntryError, OtherVersionError, OSError):
            return False
        return (found.text_digest, found.replay_digest) == (wanted.text_digest, wanted.replay_digest)
