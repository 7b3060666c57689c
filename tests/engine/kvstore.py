"""Saved sessions for the tests of the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds4jax.serving.engine.kvstore import Draft, Identity, KVPolicy, KVStore, Part, Reason, open_store

IDENTITY = Identity("model", "layout")
POLICY = KVPolicy(min_tokens=4)
NOW_S = 1_800_000_000.0


def opened(folder: Path, warnings: list[str] | None = None, identity: Identity = IDENTITY, **options: Any) -> KVStore:
    """Open a store that collects its warnings, or may give none."""

    def warn(message: str) -> None:
        assert warnings is not None, message
        warnings.append(message)

    options = {"policy": POLICY, "n_ctx": 1000, "clock": lambda: NOW_S} | options
    store = open_store(folder, identity, warn=warn, **options)
    assert store is not None
    return store


def session(tokens: Sequence[int], n_bytes: int = 300, **options: Any) -> Draft:
    """Describe a session of one array."""
    return Draft(tokens, (Part("x", "uint8", (n_bytes,)),), **({"n_ctx": 1000, "reason": Reason.COLD} | options))


def contents(draft: Draft) -> dict[str, np.ndarray]:
    """Return arrays that tell whose they are."""
    rng = np.random.default_rng(list(draft.tokens))
    return {part.name: rng.integers(0, 256, part.nbytes, np.uint8) for part in draft.parts}


def save(store: KVStore, tokens: Sequence[int], n_bytes: int = 300, **options: Any) -> bool:
    """Save a session whose contents `contents` knows; returns whether it is on disk."""
    draft = session(tokens, n_bytes, **options)
    return store.save_all(draft, pieces(draft)).result(30)


def pieces(draft: Draft, piece_bytes: int = 128) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the contents piece by piece."""
    for name, array in contents(draft).items():
        for i in range(0, len(array), piece_bytes):
            yield name, array[i : i + piece_bytes]


def files(folder: Path) -> list[Path]:
    """List entries and temporary files."""
    return sorted(path for path in folder.iterdir() if path.name != ".lock")


def total_bytes(folder: Path) -> int:
    """Return what entries and temporary files take."""
    total = 0
    for path in files(folder):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
