"""Pack token sequences of many lengths into windows, and keep them on disk."""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds4jax.text.vocabulary import Vocabulary

ALIGN = 4  # sequences begin at multiples of the smaller compression ratio, as they do in a slot
_OPEN = 64  # windows that are filled at a time


@dataclass(frozen=True)
class Packed:
    """Windows of whole conversations, each a row of uint16: `windows` to train on, `held_out` to measure with."""

    vocabulary: Vocabulary
    windows: np.ndarray
    held_out: np.ndarray


def pack_windows(sequences: Iterable[Sequence[int]], width: int, pad: int) -> np.ndarray:
    """Fill windows of `width` tokens with whole sequences, first fit: uint16 [n, width]. Longer sequences are left out."""
    return np.array(list(_windows(sequences, width, pad)), np.uint16).reshape(-1, width)


def _windows(sequences: Iterable[Sequence[int]], width: int, pad: int) -> Iterator[np.ndarray]:
    """Yield windows as they fill up: an open window takes what fits, and the fullest makes room for a new one."""
    opened: list[list[int]] = []
    for sequence in sequences:
        ids = [*sequence, *[pad] * (-len(sequence) % ALIGN)]
        if len(ids) > width:
            continue
        fitting = next((window for window in opened if len(window) + len(ids) <= width), None)
        if fitting is None:
            if len(opened) == _OPEN:
                fullest = max(opened, key=len)
                opened.remove(fullest)
                yield _filled(fullest, width, pad)
            opened.append(fitting := [])
        fitting += ids
    for window in opened:
        yield _filled(window, width, pad)


def _filled(window: Sequence[int], width: int, pad: int) -> np.ndarray:
    return np.array([*window, *[pad] * (width - len(window))], np.uint16)


def save(path: Path, packed: Packed) -> None:
    """Write a file: NumPy arrays, compressed with a dictionary that spans repeated texts."""
    v = packed.vocabulary
    lists = {"tokens": v.tokens, "types": v.types, "merges": v.merges, "bos_id": v.bos_id, "eos_id": v.eos_id}
    arrays = {"windows": packed.windows, "held_out": packed.held_out}
    buffer = io.BytesIO()
    np.savez(buffer, vocabulary=np.frombuffer(json.dumps(lists).encode(), np.uint8), **arrays)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 1 << 28, "lp": 1, "lc": 3, "pb": 1}]
    path.write_bytes(lzma.compress(buffer.getvalue(), filters=filters))


def load(path: Path) -> Packed:
    """Read what `save` has written."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as file:
        lists = json.loads(bytes(file["vocabulary"]))
        vocabulary = Vocabulary(tuple(lists["tokens"]), tuple(lists["types"]), tuple(lists["merges"]), lists["bos_id"], lists["eos_id"])
        return Packed(vocabulary, file["windows"], file["held_out"])
