"""Snapshots of sessions on their way: where a prompt pauses for one, and when one is worth taking."""

from __future__ import annotations

from ds4jax.serving.engine.counters import Counters
from ds4jax.serving.engine.device import Device, DeviceStepError
from ds4jax.serving.engine.prefix import plan_stops, snapshot_interval
from ds4jax.serving.engine.session import Session
from ds4jax.serving.engine.slots import Choice, SlotTable


class Keeping:
    """Take snapshots of sessions, if the device has room for any. Failures raise DeviceStepError; the sessions are none the worse."""

    def __init__(self, device: Device, slots: SlotTable, counters: Counters, quantum: int) -> None:
        self._device, self._slots, self._counters, self._quantum = device, slots, counters, quantum

    def plan(self, session: Session, choice: Choice) -> None:
        """Plan where the prompt of a session that got a slot pauses."""
        if self._device.n_snapshots and session.request is not None:
            marks = (choice.parts_at, *session.request.marks)
            session.stops = plan_stops(session.prompt_end, session.n_cached, marks, self._slots.spacing)

    def keep(self, session: Session, distance: int | None = None) -> None:
        """Take a snapshot of a session as far as it was launched, if the last one of its slot is `distance` tokens back.

        By default, as many as are not computed as fast as one.
        """
        assert session.slot is not None
        distance = self._slots.spacing if distance is None else distance
        if not self._device.n_snapshots or session.n_fed - self._slots.snapshots.last_of(session.slot) < distance:
            return
        session.stops = [stop for stop in session.stops if stop - session.n_fed >= self._slots.spacing]
        entry = self._slots.keep(session)
        if entry is not None:
            self._counters.snapshots += 1
            try:
                self._device.save(session.slot, entry)
            except DeviceStepError:
                self._slots.snapshots.forget()
                raise

    def keep_on_the_way(self, session: Session) -> None:
        """Take a snapshot behind a chunk that was just launched, where a stop was planned or the last one is far away."""
        if session.is_manual or session.n_unfed == 0:
            return
        is_stop = session.n_fed in session.stops
        self.keep(session, None if is_stop else snapshot_interval(session.prompt_end, self._quantum))
