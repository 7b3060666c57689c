"""Saving sessions beside the steps: each is copied from its slot piece by piece, and written by another thread.

What the next token overwrites is copied at the position itself, by a program that stands right behind the step that led there. The rows
before it stay as they are for as long as nobody cuts the slot, so they are copied later, a piece between two steps. A slot that is to be
given to another prompt is not, until its last piece is enqueued: what is enqueued runs in order.

A piece is used only when every launch before it was read and none had failed. So nothing of a step that went wrong is ever committed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ds4jax.serving.engine.device import Device, DeviceStepError, Piece
from ds4jax.serving.engine.kvstore import Draft, KVStore, Reason, Saving
from ds4jax.serving.engine.log import logger

MOST_BACKLOG_BYTES = 256 << 20  # in host memory, of what the disk has not taken yet
MOST_IN_FLIGHT = 4  # pieces on their way to the host
PATIENCE_US = 10_000_000  # a prompt waits no longer for a slot than this for the sake of what was there


@dataclass(slots=True, eq=False)
class _Save:
    """A session on its way. source: its tokens, of which the last ones may be still unknown here."""

    slot: int
    position: int
    reason: Reason
    source: Sequence[int]
    state: Piece
    state_behind: int
    began_us: int
    saving: Future[Saving | None] | None = None
    has_state: bool = False
    n_exported: int = 0
    n_pieces: int = 0
    in_flight: deque[tuple[Piece, int]] = field(default_factory=deque)
    result: Future[bool] | None = None

    @property
    def is_copied(self) -> bool:
        """Whether the slot may be overwritten."""
        return self.n_exported == self.n_pieces

    @property
    def target(self) -> Saving | None:
        """Where pieces go, once that is known."""
        return self.saving.result() if self.saving is not None and self.saving.done() else None


class Saves:
    """All saves of one engine. For the engine's thread.

    replay: finds in a text (bytes) the tool-replay map that belongs to it.
    """

    def __init__(self, store: KVStore, device: Device, replay: Callable[[bytes], bytes]) -> None:
        self._store, self._device, self._replay = store, device, replay
        self._saves: list[_Save] = []
        self._has_news = False
        self._known: dict[int, int] = {}  # slot -> how much of what it holds was saved or came from disk
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="kv-draft")
        self.saved: Counter[str] = Counter()
        self.n_failed = 0

    def __len__(self) -> int:
        return len(self._saves)

    def take_news(self) -> bool:
        """Say, once, whether a save has ended or could not begin: somebody may have waited for its slot."""
        news, self._has_news = self._has_news, False
        return news

    # ------------------------------------------------------------ what there is
    def known(self, slot: int) -> int:
        """Return how many tokens of what a slot holds are on disk, as far as is known here."""
        return self._known.get(slot, 0)

    def settled(self, slot: int, n_tokens: int) -> None:
        """Note that so many tokens of what a slot holds need not be saved (again)."""
        self._known[slot] = n_tokens
        self._has_news = True  # even if saving it fails at once

    def is_copying(self, slot: int, beyond: int = 0) -> bool:
        """Whether rows of a slot behind its first `beyond` tokens are still to be copied."""
        return any(save.slot == slot and save.position > beyond and not save.is_copied for save in self._saves)

    def has_patience(self, slot: int, now_us: int) -> bool:
        """Whether the saves of a slot may go on taking time."""
        return all(now_us - save.began_us < PATIENCE_US for save in self._saves if save.slot == slot)

    # ------------------------------------------------------------ beginnings and ends
    def begin(self, slot: int, position: int, reason: Reason, source: Sequence[int], n_launched: int, now_us: int) -> None:
        """Begin to save what a slot holds behind all that was enqueued. source: its tokens. Raises DeviceStepError.

        n_launched: steps so far. An intermediate save that nobody has begun to copy makes room for a later one.
        """
        self.settled(slot, position)
        for save in [save for save in self._saves if save.slot == slot and save.reason is Reason.CONTINUED and not save.n_exported]:
            self._drop(save)
        save = _Save(slot, position, reason, source, self._device.export_state(slot), n_launched, now_us)
        save.n_pieces = self._device.n_pieces(position)
        self._saves.append(save)

    def cut(self, slot: int, position: int, known: int = 0) -> None:
        """Note that a slot keeps its first `position` tokens only; what was not copied yet is not saved.

        known: tokens that are on disk of what it will hold, if it held something else before.
        """
        for save in [save for save in self._saves if save.slot == slot and save.position > position and not save.is_copied]:
            self._drop(save)
        if self.known(slot) > position or known:
            self._known[slot] = known

    def distrust(self, slot: int) -> None:
        """Give up what is being saved of a slot in which something went wrong."""
        for save in [save for save in self._saves if save.slot == slot and save.result is None]:
            self._drop(save)

    def forget(self) -> None:
        """Give everything up that is not on its way to the disk: the cache is lost."""
        for save in [save for save in self._saves if save.result is None]:
            self._drop(save)
        self._known.clear()

    def _remove(self, save: _Save) -> None:
        self._saves.remove(save)
        self._has_news = True

    def _drop(self, save: _Save) -> None:
        self._remove(save)
        if save.saving is not None:
            save.saving.add_done_callback(_cancel)

    def close(self, within_s: float) -> None:
        """End what is not finished, and wait for the disk."""
        for save in [save for save in self._saves if save.result is None]:
            self._drop(save)
        self._preparing.shutdown()
        self._store.close(within_s)
        self._count()

    # ------------------------------------------------------------ going on
    def advance(self, n_read: int, n_launched: int, most: int) -> None:
        """Take what has come from the device, and enqueue up to `most` pieces. Raises DeviceStepError, with the save given up.

        n_read, n_launched: steps so far; all that were launched before a piece must have been read before it is used.
        """
        self._count()
        for save in list(self._saves):
            if save.saving is None and len(save.source) >= save.position:
                save.saving = self._preparing.submit(self._prepare, list(save.source[: save.position]), save.reason)
            if save.saving is not None and save.saving.done():
                self._collect(save, n_read)
        room = min(most, MOST_IN_FLIGHT - sum(len(save.in_flight) for save in self._saves))
        backlog = sum(save.target.backlog_bytes for save in self._saves if save.target is not None)
        for save in self._saves:
            while room > 0 and backlog < MOST_BACKLOG_BYTES and save.target is not None and not save.is_copied:
                self._export(save, n_launched)
                room -= 1

    def _prepare(self, tokens: list[int], reason: Reason) -> Saving | None:
        """Work out what is to be written; on a thread of its own, for the texts of long sessions are long."""
        try:
            texts = self._store.texts
            text = b"" if texts is None else texts.read(tokens).text
            draft = Draft(tokens, self._device.session_parts(len(tokens)), self._device.n_ctx, reason, text, self._replay(text))
            return self._store.save(draft)
        except Exception:  # a bug, or no memory: neither is worth a request
            logger.exception("a session was not saved")
            return None

    def _export(self, save: _Save, n_launched: int) -> None:
        try:
            save.in_flight.append((self._device.export_rows(save.slot, save.n_exported, save.position), n_launched))
        except DeviceStepError:
            self._drop(save)
            raise
        save.n_exported += 1

    def _collect(self, save: _Save, n_read: int) -> None:
        """Hand what has come to the disk's thread; end the save with the last piece."""
        assert save.saving is not None
        if save.result is not None:
            return
        try:
            target = save.saving.result()
            if target is None or not target.wanted:  # too large, there already, or failed, which the store has told
                self.n_failed += target is not None and target.failed
                self._drop(save)
                return
            if not save.has_state and save.state_behind <= n_read and save.state.ready():
                self._put(target, save.state)
                save.has_state = True
            while save.in_flight and save.in_flight[0][1] <= n_read and save.in_flight[0][0].ready():
                self._put(target, save.in_flight.popleft()[0])
            if save.has_state and save.is_copied and not save.in_flight:
                save.result = target.finish()
        except DeviceStepError as error:
            logger.warning("a session was not saved: %s", error.cause)
            self.n_failed += 1
            self._drop(save)

    @staticmethod
    def _put(target: Saving, piece: Piece) -> None:
        for name, array in piece.arrays().items():
            target.put(name, array)

    def _count(self) -> None:
        for save in [save for save in self._saves if save.result is not None and save.result.done()]:
            self._remove(save)
            if save.result is not None and save.result.result():
                self.saved[save.reason.value] += 1
            else:
                self.n_failed += 1


def _cancel(prepared: Future[Saving | None]) -> None:
    if not prepared.cancelled() and prepared.exception() is None and (saving := prepared.result()) is not None:
        saving.cancel()
