"""The folder that servers share: a lock, temporary files, and what there is.

Only making room needs the lock: whoever saves, sees under it what there is, deletes, and takes the room by a temporary file of the
final size, which all others count. Everything else goes without: files appear whole by a rename, and readers bear that they vanish.

A temporary file is held by a lock of its own while somebody writes. Such a lock ends with its process, however that ends, so a file
that can be locked is litter, whatever became of the process id.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ds4jax.serving.engine.kvstore.files import SUFFIX, read_header
from ds4jax.serving.engine.kvstore.format import CorruptEntryError, Header, OtherVersionError, Usage
from ds4jax.serving.engine.kvstore.keys import KEY_BYTES

LOCK_NAME = ".lock"
LOCK_TIMEOUT_S = 5.0
_OUR_NAME = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}{re.escape(SUFFIX)}")
_TEMPORARY = ".tmp."
_ABANDONED_AFTER_S = 3600.0
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class State(StrEnum):
    """What can be told of a file without reading all of it."""

    OK = "ok"
    CORRUPT = "corrupt"
    OTHER_VERSION = "other version"


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A file of ours in the folder. header None: it cannot be read, and problem says why."""

    key: str
    path: Path
    size_bytes: int
    header: Header | None
    usage: Usage
    state: State = State.OK
    problem: str = ""


class Index:
    """List the entries of a folder; headers are read again only of files that changed.

    Any thread may scan: what is known is replaced by one assignment.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, int, int, int], StoredEntry] = {}

    def scan(self) -> list[StoredEntry]:
        """Return what is there now; files that are not named as ours are left alone. Raises OSError if the folder cannot be read."""
        known = {}
        with os.scandir(self._folder) as items:
            for item in items:
                if not _OUR_NAME.fullmatch(item.name):
                    continue
                try:
                    stat = item.stat()
                    mark = (item.name, stat.st_ino, stat.st_size, stat.st_mtime_ns)
                    known[mark] = self._known.get(mark) or _read(Path(item.path), stat.st_size)
                except OSError:  # gone meanwhile, or not for us to read
                    continue
        self._known = known
        return list(known.values())


def _read(path: Path, size_bytes: int) -> StoredEntry:
    try:
        header, usage = read_header(path)
        return StoredEntry(path.stem, path, size_bytes, header, usage)
    except CorruptEntryError as error:
        return StoredEntry(path.stem, path, size_bytes, None, Usage(), State.CORRUPT, str(error))
    except OtherVersionError as error:
        return StoredEntry(path.stem, path, size_bytes, None, Usage(), State.OTHER_VERSION, str(error))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises TimeoutError if another server keeps it, OSError if the folder cannot be written.

    On file systems without locks everything works, except that servers that save at the same moment may exceed the budget.
    """
    fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while _try_lock(fd) is False:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"another server has held {folder / LOCK_NAME} for {LOCK_TIMEOUT_S:.0f} s")
            time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Lock a file if nobody has it. None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS_HERE:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def create_temporary(folder: Path, size_bytes: int) -> tuple[int, Path]:
    """Make a temporary file of a size (no blocks are taken yet). Call it under the folder's lock. Returns it open. Raises OSError."""
    path = folder / f"{_TEMPORARY}{os.getpid()}.{secrets.token_hex(6)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _try_lock(fd)
        os.ftruncate(fd, size_bytes)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(fd)
        raise
    return fd, path


def count_temporaries(folder: Path) -> int:
    """Return the bytes of entries that are being written, after deleting those that nobody writes any more. Call it under the lock."""
    with os.scandir(folder) as items:
        names = [item.name for item in items if item.name.startswith(_TEMPORARY)]
    total = 0
    for name in names:
        with suppress(OSError):  # gone meanwhile
            total += _size_unless_abandoned(folder / name)
    return total


def _size_unless_abandoned(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        stat, free = os.fstat(fd), _try_lock(fd)
        if free or (free is None and time.time() - stat.st_mtime > _ABANDONED_AFTER_S):
            # Its writer may just have renamed it and let go. Then this name is gone and never comes again.
            path.unlink(missing_ok=True)
            return 0
        return stat.st_size
    finally:
        os.close(fd)
