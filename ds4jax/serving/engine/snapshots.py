"""Which snapshots the device keeps, and which slots still hold the compressed rows that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Found(NamedTuple):
    """A snapshot to return to: its place in the pool, its position in tokens, and the slots that hold its rows."""

    entry: int
    position: int
    homes: frozenset[int]


@dataclass(slots=True)
class _Snapshot:
    position: int
    homes: set[int]
    used_at: int
    is_shared: bool = False  # by several conversations, or likely to be


class SnapshotPool:
    """Keep the books of M snapshots. Pure: the arrays are the device's.

    A snapshot holds no tokens: it belongs to the first `position` tokens of its homes, which are the same in all of them. A home that is
    cut below that position is one no longer, and a snapshot without a home is gone, for its rows are nowhere.
    A place can be given away while a copy from it is under way, for what is enqueued runs in order.

    The least recently used goes first. Shared ones are pinned as long as they are no more than half: conversations under way take
    snapshots at every turn, and would drive out the system prompt that the next conversation begins with.
    """

    def __init__(self, n_entry: int) -> None:
        self._entries: list[_Snapshot | None] = [None] * n_entry
        self._clock = 0

    def __len__(self) -> int:
        return sum(entry is not None for entry in self._entries)

    def find(self, shared: Sequence[int]) -> Found | None:
        """Find the longest snapshot for a prompt; shared: tokens that each slot's contents have in common with it."""
        best: Found | None = None
        for index, entry in enumerate(self._entries):
            if entry is not None and (best is None or entry.position > best.position):
                homes = frozenset(slot for slot in entry.homes if shared[slot] >= entry.position)
                if homes:
                    best = Found(index, entry.position, homes)
        return best

    def last_of(self, slot: int) -> int:
        """Position of the latest snapshot of what a slot holds; 0 if there is none."""
        return max((entry.position for entry in self._entries if entry is not None and slot in entry.homes), default=0)

    def latest(self, slot: int, most: int) -> Found | None:
        """Find the latest snapshot of the first `most` tokens of what a slot holds."""
        mine = [(entry.position, index) for index, entry in enumerate(self._entries) if entry is not None and slot in entry.homes]
        position, index = max((one for one in mine if one[0] <= most), default=(0, -1))
        return Found(index, position, frozenset({slot})) if position else None

    def touch(self, index: int, *, is_shared: bool = False) -> None:
        """Note that a snapshot was used. is_shared: for more than the conversation that it was taken of."""
        entry = self._entries[index]
        assert entry is not None
        self._clock += 1
        entry.used_at, entry.is_shared = self._clock, entry.is_shared or is_shared

    def add(self, slot: int, position: int, is_same: Callable[[int], bool], *, is_shared: bool = False) -> int | None:
        """Find a place for a snapshot of a slot at a position: a free one, or that of the least recently used.

        is_same: whether another slot's first `position` tokens are those of this one; a snapshot of them then serves both.
        is_shared: other conversations are likely to begin with it. Returns None if there is such a snapshot already, or no pool.
        """
        for index, entry in enumerate(self._entries):
            if entry is not None and entry.position == position and (slot in entry.homes or is_same(next(iter(entry.homes)))):
                entry.homes.add(slot)
                self.touch(index, is_shared=is_shared)
                return None
        if not self._entries:
            return None
        index = self._next_to_go()
        self._entries[index] = _Snapshot(position, {slot}, 0)
        self.touch(index, is_shared=is_shared)
        return index

    def _next_to_go(self) -> int:
        n_shared = sum(entry is not None and entry.is_shared for entry in self._entries)
        pins = 2 * n_shared <= len(self._entries)

        def worth(index: int) -> tuple[bool, int]:
            entry = self._entries[index]
            return (False, -1) if entry is None else (entry.is_shared and pins, entry.used_at)

        return min(range(len(self._entries)), key=worth)

    def cut(self, slot: int, position: int) -> None:
        """Note that a slot keeps its first `position` tokens only."""
        for index, entry in enumerate(self._entries):
            if entry is not None and entry.position > position:
                entry.homes.discard(slot)
                if not entry.homes:
                    self._entries[index] = None

    def fork(self, source: int, target: int, position: int) -> None:
        """Note that a slot holds the first `position` tokens of another one, and nothing else."""
        self.cut(target, 0)
        for entry in self._entries:
            if entry is not None and source in entry.homes and entry.position <= position:
                entry.homes.add(target)

    def distrust(self, slot: int, position: int) -> None:
        """Forget what a session has kept that then went wrong: all of its slot beyond `position`, whoever else shares it."""
        for index, entry in enumerate(self._entries):
            if entry is not None and slot in entry.homes and entry.position > position:
                self._entries[index] = None

    def forget(self) -> None:
        """Forget everything, because the arrays are lost."""
        self._entries = [None] * len(self._entries)
