"""One saved session as a file: what its bytes mean. Pure: bytes in, plain values out, and back.

All numbers are little endian, as the hosts are that JAX runs on. Nothing lies between or after the sections, so every bit of a file
is under a digest. Digests are BLAKE2b of 16 bytes.

    offset  bytes  what
         0      8  "DS4JAXKV"
         8      4  u32 version, 1
        12      4  u32 length of the header
        16     16  digest of bytes 0-15 and the header
        32      8  u64 hits
        40      8  f64 when the entry was used last, in s since 1970
        48     16  digest of bytes 32-47
        64         header: JSON of `Header`, which names the sections in their order
                   sections: "tokens" (u32), "text", "replay", then the arrays of the session, row-major

Hits and last use change in place while the rest never does. They have a digest of their own, and a record that two servers wrote at
once (or that is damaged) costs the entry its rank in eviction, never its life.

The name of a file is `<key>.d4kv`: the key is a digest of model, layout and tokens (`keys`), so a file under another's name is found out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod

import ml_dtypes
import msgspec
import numpy as np

MAGIC, VERSION = b"DS4JAXKV", 1
PRELUDE_BYTES = 64
MAX_HEADER_BYTES = 1 << 20
_FIXED, _USAGE = struct.Struct("<8sII"), struct.Struct("<Qd")
USAGE_OFFSET = 32
_UNKNOWN_DIGEST = "0" * 32

DTYPES: dict[str, np.dtype] = {name: np.dtype(name) for name in ("uint8", "int8", "uint32", "int32", "float16", "float32")}
DTYPES["bfloat16"] = np.dtype(ml_dtypes.bfloat16)


class CorruptEntryError(Exception):
    """A file of ours does not hold what was written; the message says where."""


class OtherVersionError(Exception):
    """A file of ours was written by a version of ds4jax whose format is not known here."""


class Reason(StrEnum):
    """Why a session was saved."""

    COLD = "cold"  # the beginning of a new prompt
    CONTINUED = "continued"  # a session went on for a while
    EVICT = "evict"  # its slot was needed
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Part:
    """An array of a session: its name, a dtype of DTYPES and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of the file, and the digest of its bytes in hex."""

    part: Part
    digest: str = _UNKNOWN_DIGEST


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    model, layout: digests of the weights and of the cache's layout. n_ctx: tokens that the slot held.
    created_s: since 1970. sections: tokens, text, replay, then the arrays.
    """

    model: str
    layout: str
    n_ctx: int
    reason: Reason
    created_s: float
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        names = [section.part.name for section in self.sections]
        if names[:3] != ["tokens", "text", "replay"] or len(set(names)) != len(names):
            raise ValueError(f"sections are {names}")
        for section in self.sections:
            if section.part.dtype not in DTYPES or any(n < 0 for n in section.part.shape) or len(section.digest) != len(_UNKNOWN_DIGEST):
                raise ValueError(f"section {section.part.name} is {section}")
        if self.sections[0].part.dtype != "uint32" or any(s.part.dtype != "uint8" for s in self.sections[1:3]):
            raise ValueError("tokens, text or replay have another type")

    @property
    def n_tokens(self) -> int:
        """Tokens of the session."""
        return prod(self.sections[0].part.shape)

    @property
    def n_text(self) -> int:
        """Bytes of the text that the tokens were, or that a client sees of them; 0 where only tokens are known."""
        return self.sections[1].part.nbytes

    @property
    def text_digest(self) -> str:
        """Digest of the text."""
        return self.sections[1].digest

    @property
    def n_replay(self) -> int:
        """Bytes of the tool-replay map."""
        return self.sections[2].part.nbytes

    @property
    def replay_digest(self) -> str:
        """Digest of the tool-replay map."""
        return self.sections[2].digest

    @property
    def parts(self) -> tuple[Part, ...]:
        """The arrays."""
        return tuple(section.part for section in self.sections[3:])

    def offsets(self) -> Iterator[tuple[Section, int]]:
        """Yield every section with its place in the file."""
        offset = PRELUDE_BYTES + len(_encode_header(self))
        for section in self.sections:
            yield section, offset
            offset += section.part.nbytes

    @property
    def file_bytes(self) -> int:
        """Size of the whole file. Digests do not change it."""
        return PRELUDE_BYTES + len(_encode_header(self)) + sum(section.part.nbytes for section in self.sections)

    def with_digests(self, digests: dict[str, str]) -> Header:
        """Return the header with the digests of sections filled in, by name."""
        return replace(self, sections=tuple(Section(s.part, digests.get(s.part.name, s.digest)) for s in self.sections))


@dataclass(frozen=True, slots=True)
class Usage:
    """How often an entry was used, and when last (s since 1970; None: unknown, because the record is damaged)."""

    hits: int = 0
    last_used_s: float | None = None


@dataclass(frozen=True)
class Entry:
    """A saved session, whole: tokens [n] uint32, text and tool-replay map as bytes, arrays by name."""

    header: Header
    tokens: np.ndarray
    text: bytes
    replay: bytes
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


def hasher() -> hashlib.blake2b:
    """Begin a digest, as every section has one."""
    return hashlib.blake2b(digest_size=16)


def digest_of(data: bytes) -> str:
    """Return the digest of a section that is at hand, in hex."""
    return _digest(data).hex()


def encode_prelude(header: Header, usage: Usage) -> bytes:
    """Return all that stands before the sections."""
    body = _encode_header(header)
    fixed = _FIXED.pack(MAGIC, VERSION, len(body))
    return fixed + _digest(fixed + body) + encode_usage(usage) + body


def encode_usage(usage: Usage) -> bytes:
    """Return the record that is rewritten in place, for USAGE_OFFSET."""
    record = _USAGE.pack(usage.hits, usage.last_used_s or 0.0)
    return record + _digest(record)


def decode_usage(prelude: bytes) -> Usage:
    """Read hits and last use from the first PRELUDE_BYTES of a file."""
    record = prelude[USAGE_OFFSET : USAGE_OFFSET + _USAGE.size]
    if _digest(record) != prelude[USAGE_OFFSET + _USAGE.size : PRELUDE_BYTES]:
        return Usage()
    return Usage(*_USAGE.unpack(record))


def header_bytes(prelude: bytes) -> int:
    """Return how long the header is that follows these first PRELUDE_BYTES.

    Raises CorruptEntryError for what was never a file of ours, OtherVersionError for another format.
    """
    if len(prelude) < PRELUDE_BYTES:
        raise CorruptEntryError(f"it ends after {len(prelude)} bytes")
    magic, version, n_header = _FIXED.unpack(prelude[: _FIXED.size])
    if magic != MAGIC:
        raise CorruptEntryError("it does not begin as a saved session")
    if version != VERSION:
        raise OtherVersionError(f"its format has version {version}, known here is {VERSION}")
    if n_header > MAX_HEADER_BYTES:
        raise CorruptEntryError(f"a header of {n_header} bytes is announced")
    return int(n_header)


def decode_header(prelude: bytes, body: bytes) -> Header:
    """Read the header from the first PRELUDE_BYTES and the bytes that follow. Raises CorruptEntryError."""
    if len(body) != header_bytes(prelude):
        raise CorruptEntryError("it ends within the header")
    if _digest(prelude[: _FIXED.size] + body) != prelude[_FIXED.size : USAGE_OFFSET]:
        raise CorruptEntryError("the header has another digest")
    try:
        return msgspec.json.decode(body, type=Header)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptEntryError(f"the header makes no sense ({error})") from error


def _encode_header(header: Header) -> bytes:
    return msgspec.json.encode(header)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
