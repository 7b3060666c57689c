"""Decide what to launch next. Pure: no clock, no thread, no device.

Decode steps and prefill chunks share one device and are never fused, so this is a matter of turns:

- A decode step takes every pending session, at the latest `coalesce_us` after the first of them could run.
- It waits only for sessions that generate and could still join: manual ones whose users were just given a result. Driven
  sessions are pending again as soon as they are launched, so a server without notebooks never waits.
- While somebody is pending, a waiting prefill gets one chunk every `decode_steps_per_prefill` decode steps; else it runs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4jax.config import EngineConfig
from ds4jax.serving.engine.session import Session, State


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing can be launched before an outstanding result is read or something new arrives."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Keep the window open until this time: more rows may join."""

    us: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Launch the next n_tokens of one session's prompt."""

    session: Session
    n_tokens: int

    @property
    def sessions(self) -> tuple[Session, ...]:
        return (self.session,)


@dataclass(frozen=True, slots=True)
class Decode:
    """Launch one decode step for these sessions, in slot order."""

    rows: tuple[Session, ...]

    @property
    def sessions(self) -> tuple[Session, ...]:
        return self.rows


Plan = Idle | WaitUntil | Prefill | Decode


@dataclass(frozen=True, slots=True)
class Turns:
    """What fairness remembers: decode steps since the last prefill chunk, and the slot which had that chunk."""

    decode_steps: int = 0
    last_prefill_slot: int = -1

    def after(self, plan: Plan) -> Turns:
        """Count a launch."""
        if isinstance(plan, Prefill):
            assert plan.session.slot is not None
            return Turns(0, plan.session.slot)
        return Turns(self.decode_steps + 1, self.last_prefill_slot) if isinstance(plan, Decode) else self


def plan(residents: Sequence[Session], now_us: int, config: EngineConfig, turns: Turns, max_chunk: int) -> Plan:
    """Plan the next launch for the sessions that hold slots (in slot order).

    max_chunk: the longest prefill chunk, in tokens, that the device has a program for.
    """
    pending = tuple(s for s in residents if s.state is State.PENDING)
    prefilling = [s for s in residents if s.state is State.PREFILLING]
    if prefilling and (not pending or turns.decode_steps >= config.decode_steps_per_prefill):
        quantum = config.mixed_prefill_quantum if any(s.is_active for s in residents) else config.prefill_quantum
        session = _next_in_turn(prefilling, turns.last_prefill_slot)
        return Prefill(session, min(session.n_until_stop, quantum, max_chunk))
    if not pending:
        return Idle()
    if _would_fall_out_of_step(pending, residents):
        return Idle()
    window_end_us = _window_end_us(pending, residents, config.coalesce_us)
    return Decode(pending) if window_end_us <= now_us else WaitUntil(window_end_us)


def _next_in_turn(prefilling: Sequence[Session], last_slot: int) -> Session:
    """Pick the first slot after the last one served, wrapping around."""
    return min(prefilling, key=lambda s: (s.slot is not None and s.slot <= last_slot, s.slot))


def _would_fall_out_of_step(pending: Sequence[Session], residents: Sequence[Session]) -> bool:
    """Whether only sessions that wait for the host are pending while the step of another such one is unread.

    Launched now, the two would alternate for ever and never share a batch; so the result is read first, and then the other, where
    it is a manual one, has one window to join. The rest does not wait for that: they run ahead, and those that wait go along.
    """
    return all(s.waits_for_host for s in pending) and any(
        s.waits_for_host and s.is_active and s.state is State.IN_FLIGHT for s in residents
    )


def _window_end_us(pending: Sequence[Session], residents: Sequence[Session], coalesce_us: int) -> int:
    """When the pending sessions are launched at the latest; 0, long past, when there is nobody to wait for.

    The window counts from the first pending row, or from the moment the straggler could first answer if that is later: a
    user who was shown a result a microsecond ago has not missed anything yet.
    """
    first_us = min(s.pending_since_us for s in pending)
    stragglers = [s for s in residents if s.is_active and s.state is State.IDLE]
    return max((max(first_us, s.idle_since_us) + coalesce_us for s in stragglers), default=0)
