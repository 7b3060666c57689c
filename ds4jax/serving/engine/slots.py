"""Who lives in which slot, and what a free slot still remembers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds4jax.serving.engine.session import Session


class Choice(NamedTuple):
    """A free slot for a prompt. n_cached leading tokens are there already; must_clear: empty it before anything is fed."""

    slot: int
    n_cached: int
    must_clear: bool


@dataclass(slots=True)
class _Slot:
    session: Session | None = None
    history: tuple[int, ...] = ()  # what may be continued; () also when the contents cannot be trusted
    empty: bool = True  # at position 0: nothing to clear
    freed_at: int = 0  # order of releases, for the least recently used


class SlotTable:
    """Map slots to resident sessions and choose slots for new ones."""

    def __init__(self, n_slots: int) -> None:
        self._slots = [_Slot() for _ in range(n_slots)]
        self._releases = 0

    def __len__(self) -> int:
        return len(self._slots)

    def residents(self) -> Iterator[Session]:
        """Walk over the sessions that hold a slot, in slot order."""
        return (slot.session for slot in self._slots if slot.session is not None)

    def choose(self, prompt: Sequence[int]) -> Choice | None:
        """Choose a free slot for a prompt, or None when all are taken.

        A slot whose whole history begins the prompt comes first, the longest of them; then one with nothing to lose; then the
        one that was left the longest ago. A history that only overlaps is worthless (the cache cannot be rewound), so a shared
        first token does not draw every new chat to one slot and destroy what it holds. At least one token of the
        prompt is left to feed: the first logits come from it.
        """
        free = [(slot, index, _n_reusable(slot.history, prompt)) for index, slot in enumerate(self._slots) if slot.session is None]
        if not free:
            return None
        slot, index, n_cached = min(free, key=lambda f: (-f[2], bool(f[0].history), f[0].freed_at, f[1]))
        return Choice(index, n_cached, must_clear=n_cached == 0 and not slot.empty)

    def take(self, choice: Choice, session: Session) -> None:
        """Give a chosen slot to a session."""
        self._slots[choice.slot].session = session

    def release(self, index: int, history: Sequence[int] | None) -> None:
        """Take a slot back. history: the tokens that were fed to it; None when its contents cannot be trusted."""
        self._releases += 1
        self._slots[index] = _Slot(None, tuple(history or ()), empty=history is not None and not history, freed_at=self._releases)

    def forget(self) -> None:
        """Drop the histories of all free slots, because the cache behind them is lost."""
        for slot in self._slots:
            slot.history, slot.empty = (), False


def _n_reusable(history: tuple[int, ...], prompt: Sequence[int]) -> int:
    """Count the tokens of the prompt that a slot holds: all of its history, or nothing."""
    n = len(history)
    return n if n < len(prompt) and tuple(prompt[:n]) == history else 0
