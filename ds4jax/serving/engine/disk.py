"""When sessions go to disk and come from there. `saves` and `loads` do it, `kvstore` keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds4jax.serving.engine.device import Device, DeviceStepError
from ds4jax.serving.engine.kvstore import Found, KVStore, Reason
from ds4jax.serving.engine.kvstore.policy import cold_position, continued_due, next_continued, worth_saving
from ds4jax.serving.engine.loads import Loads
from ds4jax.serving.engine.pipeline import Pipeline
from ds4jax.serving.engine.saves import Saves
from ds4jax.serving.engine.session import Session
from ds4jax.serving.engine.slots import Choice, SlotTable

POLL_US = 1000  # how often a resting engine looks for what came from the disk or the device
SHUTDOWN_S = 20.0  # for what is saved at the end, all of it
_AT_ONCE = 4  # pieces between two steps while nobody waits for the next token; else one


@dataclass(frozen=True)
class SavedSessions:
    """A folder of sessions, and what must be known of prompts to use it.

    anchor: where in a prompt others are likely to part from it, if anywhere. opens_reasoning: whether a prompt that ends with this token
    is continued by another text than the model goes on with, for templates drop the reasoning of earlier turns. replay: finds in a text
    the tool-replay map that belongs to it.
    """

    store: KVStore
    anchor: Callable[[Sequence[int]], int | None] = lambda prompt: None
    opens_reasoning: Callable[[int], bool] = lambda token: False
    replay: Callable[[bytes], bytes] = lambda text: b""


class Disk:
    """What an engine does with its folder. For the engine's thread; whatever raises DeviceStepError has given up what it was about."""

    def __init__(self, saved: SavedSessions, device: Device, slots: SlotTable, pipeline: Pipeline, clock_us: Callable[[], int]) -> None:
        self._saved, self._device, self._slots, self._pipeline, self._clock_us = saved, device, slots, pipeline, clock_us
        self._policy = saved.store.policy
        self.saves = Saves(saved.store, device, saved.replay)
        self.loads = Loads(saved.store, device)

    def wants_step(self) -> bool:
        """Whether anything is under way, or has ended since this was asked last, so that a step should come soon."""
        return self.saves.take_news() or bool(self.saves) or self.loads.is_busy

    # ------------------------------------------------------------ who gets a slot
    def holds(self, session: Session) -> bool:
        """Whether a prompt waits for what was begun for it before; cheap, unlike looking for what there is of a long prompt."""
        slot = session.awaited_slot
        if slot is not None and not (self.saves.is_copying(slot) and self.saves.has_patience(slot, self._clock_us())):
            slot = session.awaited_slot = None
        return slot is not None or self.loads.is_reading(session)

    def awaits(self, session: Session, n_cached: int) -> bool:
        """Whether a prompt of which n_cached tokens are in memory waits for the disk."""
        return self.loads.awaits_disk(session, n_cached, self._slots.spacing, self._clock_us())

    def is_vacant(self, choice: Choice, session: Session) -> bool:
        """Whether a slot may be used as chosen; if not, what is in it is being saved. Raises DeviceStepError.

        A conversation that takes its own place was edited, or cut to fit, and will not come back to what was there.
        """
        slot, kept = choice.slot, choice.n_kept
        if self._slots.is_own(slot, session.conversation):
            return True
        if self.saves.is_copying(slot, kept):
            is_busy = self.saves.has_patience(slot, self._clock_us())
        else:
            is_busy = self._save(slot, kept, Reason.EVICT)
        session.awaited_slot = slot if is_busy else None
        return not is_busy

    def _save(self, slot: int, kept: int, reason: Reason) -> bool:
        """Begin to save what a free slot holds, if that is worth it where its first `kept` tokens stay; says whether it is."""
        history, prompt_end = self._slots.left(slot)
        least = max(kept, self.saves.known(slot)) + self._slots.spacing
        only_an_answer = 0 < prompt_end <= kept + self._slots.spacing  # is given up, to be written anew or without its thoughts
        if only_an_answer or not worth_saving(len(history), self._policy) or len(history) < least:
            return False
        self.saves.settled(slot, len(history))  # first of all: what fails is not tried again
        if prompt_end and self._saved.opens_reasoning(history[prompt_end - 1]):
            found = self._slots.snapshots.latest(slot, prompt_end - 1)
            if found is not None and found.position >= max(least, self._policy.min_tokens):
                self._device.restore(found.entry, slot, slot)
                self._slots.rewind(slot, found.position)
                history = history[: found.position]
        self.saves.begin(slot, len(history), reason, history, self._pipeline.n_launched, self._clock_us())
        return True

    def moved_in(self, session: Session, choice: Choice, found: Found | None) -> None:
        """Note what became of a slot, and plan where its new prompt is saved on the way."""
        self.saves.cut(choice.slot, choice.n_kept, found.entry.header.n_tokens if found else 0)
        if found is not None:
            self.loads.begin(session, found)
        if session.is_manual:
            return
        n_cached = session.n_cached
        stops = []
        if n_cached == 0:
            cold = cold_position(session.prompt_end, self._saved.anchor(session.tokens), self._policy)
            session.cold_at = cold
            stops = [cold] if cold is not None else []
        position = next_continued(n_cached, self._policy)
        while position is not None and position < session.prompt_end:
            stops.append(position)
            position = next_continued(position, self._policy)
        session.save_stops = sorted(stops)

    # ------------------------------------------------------------ beside the steps
    def launched(self, sessions: Sequence[Session]) -> None:
        """Begin to save those sessions of a step just enqueued that stand where they are to be saved. Raises DeviceStepError."""
        for session in sessions:
            if session.is_manual or session.slot is None:
                continue
            n, known = session.n_fed, self.saves.known(session.slot)
            if n == session.cold_at and n > known:
                reason = Reason.COLD
            elif continued_due(n, known, self._policy):
                reason = Reason.CONTINUED
            else:
                continue
            self.saves.begin(session.slot, n, reason, session.tokens, self._pipeline.n_launched, self._clock_us())

    def advance_saves(self, *, decoding: bool) -> None:
        """Do a little of what is being saved. Raises DeviceStepError."""
        if self.saves:
            self.saves.advance(self._pipeline.n_read, self._pipeline.n_launched, 1 if decoding else _AT_ONCE)

    def advance_loads(self, *, decoding: bool) -> list[Session]:
        """Do a little of what is being loaded; returns the sessions whose slots were filled. Raises DeviceStepError."""
        return self.loads.advance(1 if decoding else _AT_ONCE, self._clock_us())

    def doubt(self, session: Session) -> None:
        """Save nothing of a session whose logits are unusable, and do not load again what it began with."""
        if session.slot is not None:
            self.saves.distrust(session.slot)
        if session.n_loaded:
            self._saved.store.discard(session.tokens[: session.n_loaded])

    def forget(self) -> None:
        """Give up all that needs the cache, which is lost."""
        self.saves.forget()
        self.loads.forget()

    def close(self) -> None:
        """Save what the slots hold, which must all be free; takes SHUTDOWN_S at most, and the end of what the disk is at."""
        deadline = time.monotonic() + SHUTDOWN_S
        try:
            for slot in self._slots.by_last_use():
                if not self.saves.is_copying(slot):
                    self._save(slot, 0, Reason.SHUTDOWN)
            while self.saves and time.monotonic() < deadline:
                self.advance_saves(decoding=False)
                time.sleep(POLL_US / 1e6)
        except DeviceStepError:
            pass  # what was copied by now is saved
        self.saves.close(max(deadline - time.monotonic(), 0.0))
