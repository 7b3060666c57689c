"""Read and write one file of a saved session. Every byte that is read is checked against its digest."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from ds4jax.serving.engine.kvstore.format import (
    DTYPES,
    PRELUDE_BYTES,
    USAGE_OFFSET,
    CorruptEntryError,
    Entry,
    Header,
    Usage,
    decode_header,
    decode_usage,
    digest_of,
    encode_prelude,
    encode_usage,
    hasher,
    header_bytes,
)
from ds4jax.serving.engine.kvstore.keys import Identity, entry_key

SUFFIX = ".d4kv"
_CHUNK_BYTES = 4 << 20
_FIRST_READ_BYTES = 8192  # holds the header of any real cache
# A file that another server deleted meanwhile; on a network file system it may still be open here.
GONE = (errno.ENOENT, errno.ESTALE)


def read_header(path: Path) -> tuple[Header, Usage]:
    """Read what a file says of itself.

    Raises CorruptEntryError (also where the file is shorter or longer than it says), OtherVersionError or OSError.
    """
    with path.open("rb", buffering=0) as file:
        return _read_header(file.fileno())


def _read_header(fd: int) -> tuple[Header, Usage]:
    start = _pread(fd, _FIRST_READ_BYTES, 0)
    prelude = start[:PRELUDE_BYTES]
    end = PRELUDE_BYTES + header_bytes(prelude)
    body = start[PRELUDE_BYTES:end] + _pread(fd, end - len(start), len(start))
    header = decode_header(prelude, body)
    size = os.fstat(fd).st_size
    if size != header.file_bytes:
        raise CorruptEntryError(f"it has {size} bytes, {header.file_bytes} were written")
    return header, decode_usage(prelude)


def read_entry(path: Path) -> Entry:
    """Read a whole session. Raises CorruptEntryError, OtherVersionError or OSError."""
    with path.open("rb", buffering=0) as file:
        header, _ = _read_header(file.fileno())
        read = {section.part.name: np.empty(section.part.nbytes, np.uint8) for section in header.sections}
        for section, offset in header.offsets():
            file.seek(offset)
            digest = hasher()
            for chunk in _chunks(memoryview(read[section.part.name])):
                if file.readinto(chunk) != len(chunk):
                    raise CorruptEntryError(f"it ends within {section.part.name}")
                digest.update(chunk)
            if digest.hexdigest() != section.digest:
                raise CorruptEntryError(f"{section.part.name} has another digest")
    arrays = {part.name: read[part.name].view(DTYPES[part.dtype]).reshape(part.shape) for part in header.parts}
    tokens = read["tokens"].view(np.uint32)
    if path.name != entry_key(Identity(header.model, header.layout), tokens) + SUFFIX:
        raise CorruptEntryError("its name is that of another session")
    return Entry(header, tokens, read["text"].tobytes(), read["replay"].tobytes(), arrays)


def read_replay(path: Path) -> bytes:
    """Read the tool-replay map alone. Raises CorruptEntryError, OtherVersionError or OSError."""
    with path.open("rb", buffering=0) as file:
        header, _ = _read_header(file.fileno())
        section, offset = next((s, o) for s, o in header.offsets() if s.part.name == "replay")
        replay = _pread(file.fileno(), section.part.nbytes, offset)
    if digest_of(replay) != section.digest:
        raise CorruptEntryError("replay has another digest")
    return replay


def record_use(path: Path, now_s: float) -> None:
    """Count a hit in the file. A folder that cannot be written, or a file that is gone, only loses the count."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            usage = decode_usage(_pread(fd, PRELUDE_BYTES, 0))
            os.pwrite(fd, encode_usage(Usage(min(usage.hits + 1, 2**63), now_s)), USAGE_OFFSET)
        finally:
            os.close(fd)


class EntryWriter:
    """Write one session into a temporary file, piece by piece, and make it visible at the end.

    fd: the file, open for writing, which has its final size already. The header comes last, with the digests: until then the file is none.
    """

    def __init__(self, fd: int, temporary: Path, final: Path, header: Header) -> None:
        self._file = open(fd, "r+b", buffering=0)  # closing it twice does no harm, unlike a descriptor
        self._temporary, self._final, self._header = temporary, final, header
        self._at = {section.part.name: offset for section, offset in header.offsets()}
        self._digests = {section.part.name: hasher() for section in header.sections}

    def write(self, name: str, data: memoryview) -> None:
        """Append bytes to a section. Raises OSError."""
        for chunk in _chunks(data):
            _pwrite(self._file.fileno(), chunk, self._at[name])
            self._digests[name].update(chunk)
            self._at[name] += len(chunk)

    def commit(self) -> None:
        """Make the file durable, then visible under its name. Raises OSError."""
        header = self._header.with_digests({name: digest.hexdigest() for name, digest in self._digests.items()})
        _pwrite(self._file.fileno(), memoryview(encode_prelude(header, Usage(0, header.created_s))), 0)
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self._final)
        self._file.close()
        _sync_folder(self._final.parent)

    def abort(self) -> None:
        """Leave nothing behind. Does nothing after a commit."""
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)
        self._file.close()


def _sync_folder(folder: Path) -> None:
    """Make a rename durable. Some file systems cannot; the entry is then lost by a power failure at worst."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _chunks(data: memoryview) -> Iterator[memoryview]:
    return (data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES))


def _pread(fd: int, n_bytes: int, offset: int) -> bytes:
    """Read up to n_bytes, less only at the end of the file."""
    read = b""
    while len(read) < n_bytes and (more := os.pread(fd, n_bytes - len(read), offset + len(read))):
        read += more
    return read


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        n = os.pwrite(fd, data, offset)
        data, offset = data[n:], offset + n
