"""Decide what to launch next. Pure: no clock, no thread, no device.

Decode steps and prefill launches share one device and are never fused, so this is a matter of turns:

- A decode step takes every pending session, at the latest `coalesce_us` after the first of them could run.
- It waits only for sessions that generate and could still join: manual ones whose users were just given a result. Driven
  sessions are pending again as soon as they are launched, so a server without notebooks never waits.
- While somebody is pending, waiting prompts get a launch every `decode_steps_per_prefill` decode steps, or sooner where more of
  them wait than decode, in that proportion, but never two launches without a decode step between them. Else they get one at once.
- Prompts stand in a queue, and one that had its piece goes to the end of it. A launch takes the first and, where its piece is
  short enough for a pack, the next of those whose pieces are, too. So the prompt at place p of the queue has its turn
  within p launches, be it long or short and whoever comes after it.
- A launch has `prefill_quantum` tokens at most, padding included, and `mixed_prefill_quantum` of one prompt while somebody
  decodes: for so long at most does a stream pause between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4jax.config import EngineConfig
from ds4jax.serving.engine.buckets import PrefillShape, fullest
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
    """Launch the next tokens of some sessions' prompts, so many of each."""

    rows: tuple[Session, ...]
    n_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Launch one decode step for these sessions, in slot order."""

    rows: tuple[Session, ...]


Plan = Idle | WaitUntil | Prefill | Decode


@dataclass(frozen=True, slots=True)
class Turns:
    """What fairness remembers: decode steps since the last prefill launch."""

    decode_steps: int = 0

    def after(self, plan: Plan) -> Turns:
        """Count a launch."""
        if isinstance(plan, Prefill):
            return Turns(0)
        return Turns(self.decode_steps + 1) if isinstance(plan, Decode) else self


def plan(
    residents: Sequence[Session], now_us: int, config: EngineConfig, turns: Turns, max_chunk: int, packs: Sequence[PrefillShape] = ()
) -> Plan:
    """Plan the next launch for the sessions that hold slots (in slot order).

    max_chunk: the longest prefill chunk of one row, in tokens, that the device has a program for. packs: its shapes for several rows.
    """
    pending = tuple(s for s in residents if s.state is State.PENDING)
    prefilling = sorted((s for s in residents if s.state is State.PREFILLING), key=lambda s: s.queued)
    n_active = sum(s.is_active for s in residents)
    if prefilling and (not pending or turns.decode_steps >= _steps_between(len(prefilling), n_active, config)):
        quantum = min(config.mixed_prefill_quantum if n_active else config.prefill_quantum, max_chunk)
        return _pack([(s, min(s.n_until_stop, quantum)) for s in prefilling], packs)
    if not pending:
        return Idle()
    if _would_fall_out_of_step(pending, residents):
        return Idle()
    window_end_us = _window_end_us(pending, residents, config.coalesce_us)
    return Decode(pending) if window_end_us <= now_us else WaitUntil(window_end_us)


def _steps_between(n_prefilling: int, n_active: int, config: EngineConfig) -> int:
    """Count the decode steps from one prefill launch to the next: fewer where more sessions wait for their first token than for another."""
    every = config.decode_steps_per_prefill
    return max(1, min(every, -(-every * n_active // n_prefilling)))


def _pack(pieces: Sequence[tuple[Session, int]], packs: Sequence[PrefillShape]) -> Prefill:
    """Launch the first of these pieces, and with it the next of those that fit into one shape."""
    (first, n_first), short = pieces[0], [piece for piece in pieces if packs and piece[1] <= packs[-1].n_tokens]
    shape = fullest(packs, len(short)) if short and short[0][0] is first else None
    if shape is None:
        return Prefill((first,), (n_first,))
    rows, n_tokens = zip(*short[: shape.n_rows], strict=True)
    return Prefill(rows, n_tokens)


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
