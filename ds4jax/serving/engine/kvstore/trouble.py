"""What goes wrong with a folder or a file: one warning each, and damaged files go."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from ds4jax.serving.engine.kvstore.files import GONE
from ds4jax.serving.engine.kvstore.folder import State, StoredEntry
from ds4jax.serving.engine.kvstore.format import CorruptEntryError

Warn = Callable[[str], None]
_HINTS = {
    errno.ENOSPC: "; free some space, or lower --kv-disk-space-mb",
    errno.EACCES: "; what is there is still used",
    errno.EROFS: "; what is there is still used",
}


class Trouble:
    """Tell of each trouble once. Any thread may call."""

    def __init__(self, folder: Path, warn: Warn) -> None:
        self._folder, self._warn = folder, warn
        self._told: set[str] = set()

    def once(self, about: str, message: str) -> None:
        """Warn, unless this was told before."""
        if about not in self._told:
            self._told.add(about)
            self._warn(message)

    def cannot_scan(self, error: OSError) -> None:
        """Tell that nothing can be found."""
        self.once(f"scan {error.errno}", f"--kv-disk-dir {self._folder}: cannot be read ({error.strerror}); no saved session is used")

    def cannot_save(self, error: OSError) -> None:
        """Tell why a session was not saved. The next one is tried again."""
        hint = _HINTS.get(error.errno or 0, "")
        self.once(f"save {error.strerror}", f"--kv-disk-dir {self._folder}: a session was not saved ({error.strerror}){hint}")

    def cannot_load(self, path: Path, error: Exception) -> None:
        """Tell why a file is not used, and delete it if it is damaged. One that another server deleted is nobody's trouble."""
        if isinstance(error, CorruptEntryError):
            self.once(path.stem, f"{path}: not a whole saved session ({error}); deleted")
            self.delete(path)
        elif not (isinstance(error, OSError) and error.errno in GONE):
            self.once(path.stem, f"{path}: a saved session that cannot be read ({error}); not used")

    def sort_out(self, entries: list[StoredEntry]) -> list[StoredEntry]:
        """Delete damaged files; return the others."""
        left = []
        for entry in entries:
            if entry.state is State.CORRUPT:
                self.cannot_load(entry.path, CorruptEntryError(entry.problem))
                continue
            if entry.state is State.OTHER_VERSION:
                self.once(entry.key, f"{entry.path}: not used ({entry.problem}); it goes when room is needed")
            left.append(entry)
        return left

    def delete(self, path: Path) -> bool:
        """Delete a file; returns whether it is gone."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if error.errno not in GONE:
                self.once(f"delete {error.errno}", f"{path}: cannot be deleted ({error.strerror})")
                return False
        return True
