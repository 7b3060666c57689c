"""Room for one more session: the budget of a folder, kept together with all servers that share it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ds4jax.config import KVPolicy
from ds4jax.serving.engine.kvstore.folder import Index, StoredEntry, count_temporaries, create_temporary, locked
from ds4jax.serving.engine.kvstore.keys import Identity, as_tokens, prefix_keys
from ds4jax.serving.engine.kvstore.policy import Standing, choose_victims
from ds4jax.serving.engine.kvstore.trouble import Trouble


class Room:
    """Delete what is worth least for what comes."""

    def __init__(
        self, folder: Path, index: Index, identity: Identity, policy: KVPolicy, clock: Callable[[], float], trouble: Trouble
    ) -> None:
        self._folder, self._index, self._identity, self._policy = folder, index, identity, policy
        self._clock, self._trouble = clock, trouble

    def take(self, size_bytes: int, tokens: np.ndarray) -> tuple[int, Path]:
        """Return an open temporary file of this size, which counts for everybody from now on. Raises OSError if it cannot be had.

        tokens: of the session that comes, uint32 [n]; what it continues is worth less.
        """
        with locked(self._folder):
            if not self._evict(self._policy.budget_bytes - size_bytes, tokens):
                raise OSError(errno.EDQUOT, "there is no room within --kv-disk-space-mb while others are being written")
            return create_temporary(self._folder, size_bytes)

    def tidy(self) -> None:
        """Delete what killed servers left half written, and what exceeds the budget. Raises OSError if the folder cannot be written."""
        with locked(self._folder):
            self._evict(self._policy.budget_bytes, as_tokens([]))

    def _evict(self, room_bytes: int, tokens: np.ndarray) -> bool:
        """Delete until entries and temporary files fit room_bytes. Returns whether they do."""
        # Temporary files first: one that is renamed between the two counts is then counted twice, not never.
        room_bytes -= count_temporaries(self._folder)
        if room_bytes < 0:
            return False
        entries = self._trouble.sort_out(self._index.scan())
        lengths = [entry.header.n_tokens for entry in entries if entry.header is not None and entry.header.n_tokens < len(tokens)]
        beginnings = set(prefix_keys(self._identity, tokens, lengths).values())
        paths = {entry.key: entry.path for entry in entries}
        standings = [self._standing(entry, entry.key in beginnings) for entry in entries]
        victims = choose_victims(standings, room_bytes, self._clock())
        return all([self._trouble.delete(paths[victim.key]) for victim in victims])

    def _standing(self, entry: StoredEntry, extended: bool) -> Standing:
        header, usage = entry.header, entry.usage
        if header is None:
            return Standing(entry.key, entry.size_bytes)
        long = header.n_tokens > self._policy.cold_max_tokens
        return Standing(entry.key, entry.size_bytes, header.n_tokens, header.reason, usage.hits, usage.last_used_s, extended, long)
