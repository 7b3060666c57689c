"""Loading saved sessions: a prompt waits for what the disk has of it, and the slot is filled between the steps of others."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from ds4jax.serving.engine.device import Device
from ds4jax.serving.engine.kvstore import Found, KVStore
from ds4jax.serving.engine.log import logger
from ds4jax.serving.engine.session import Session, State

MOST_READS = 4  # at a time: each holds a session in host memory
PATIENCE_US = 30_000_000  # a disk that does not answer costs the saved session, not the request


@dataclass(slots=True)
class _Read:
    future: Future[Found | None]
    began_us: int


@dataclass(slots=True)
class _Load:
    session: Session
    found: Found
    n_imported: int = 0


class Loads:
    """What is read for prompts that wait, and what is under way into slots. For the engine's thread."""

    def __init__(self, store: KVStore, device: Device) -> None:
        self._store, self._device = store, device
        self._reads: dict[Session, _Read] = {}
        self._done: dict[Session, Found | None] = {}
        self._loads: list[_Load] = []
        self._has_news = False

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way, or somebody has just got what he waited for."""
        return bool(self._reads or self._loads or self._has_news)

    def is_reading(self, session: Session) -> bool:
        """Whether the disk is being asked for a prompt."""
        return session in self._reads

    def awaits_disk(self, session: Session, n_cached: int, spacing: int, now_us: int) -> bool:
        """Whether a prompt waits for the disk, of which it is asked here if it may have more than n_cached tokens of it.

        spacing: tokens that are computed again as fast as they are read.
        """
        if session in self._done:
            return False
        beyond = max(n_cached + spacing, self._store.policy.min_tokens) - 1
        if len(session.tokens) - 1 <= beyond:
            return False
        if len(self._reads) + len(self._done) < MOST_READS:
            self._reads[session] = _Read(self._store.fetch(session.tokens, beyond), now_us)
        return True

    def found(self, session: Session, n_cached: int) -> Found | None:
        """Return what was read for a prompt, if that is more than n_cached tokens of it and fits the model and the slot."""
        found = self._done.get(session)
        if found is None or found.n_covered <= n_cached:
            return None
        n_tokens = found.entry.header.n_tokens
        if found.entry.header.parts != self._device.session_parts(n_tokens):
            logger.warning("a saved session of %d tokens has other arrays than this model; not used", n_tokens)
            self._done[session] = None
            return None
        return found if session.may_begin_with(n_tokens, found.n_covered) else None

    def take(self, session: Session) -> None:
        """Let go of what was read for a prompt, which gets a slot now."""
        self._done.pop(session, None)

    def begin(self, session: Session, found: Found) -> None:
        """Begin to fill the slot of a session, which must be empty."""
        self._loads.append(_Load(session, found))

    def advance(self, most: int, now_us: int) -> list[Session]:
        """Enqueue up to `most` pieces; returns the sessions that are where their files were. Raises DeviceStepError."""
        self._settle(now_us)
        ready = []
        for load in list(self._loads):
            session, entry = load.session, load.found.entry
            if session.state is not State.LOADING or session.slot is None:  # it has ended meanwhile
                self._loads.remove(load)
                continue
            n_tokens = entry.header.n_tokens
            n_pieces = self._device.n_pieces(n_tokens)
            while most > 0 and load.n_imported < n_pieces:
                self._device.import_rows(session.slot, load.n_imported, entry.arrays)
                load.n_imported += 1
                most -= 1
            if load.n_imported == n_pieces:
                self._device.import_state(session.slot, n_tokens, entry.arrays)
                self._loads.remove(load)
                ready.append(session)
        self._has_news |= bool(ready)
        return ready

    def _settle(self, now_us: int) -> None:
        """Note what was read, or will not be."""
        n_before = len(self._reads)
        for session, read in list(self._reads.items()):
            late = now_us - read.began_us > PATIENCE_US
            if session.finished or late:
                read.future.cancel()
                del self._reads[session]
                if late:
                    logger.warning("a saved session was not read within %d s; going on without", PATIENCE_US // 1_000_000)
                    self._done[session] = None
            elif read.future.done():
                del self._reads[session]
                self._done[session] = _result_of(read.future)
        self._has_news = len(self._reads) < n_before
        for session in [session for session in self._done if session.finished]:
            del self._done[session]

    def forget(self) -> None:
        """Give up what was under way into slots: the cache is lost."""
        self._loads.clear()


def _result_of(future: Future[Found | None]) -> Found | None:
    if error := future.exception():  # a bug, or no memory: neither is worth a request
        logger.warning("a saved session was not read (%s); going on without", error)
        return None
    return future.result()
