"""Padded shapes: how many rows or tokens a compiled program takes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SMALLEST_CHUNK = 128
_CHUNK_GROWTH = 4
_PACK_ROWS = (4, 16)


class PrefillShape(NamedTuple):
    """A padded prefill launch: pieces of so many prompts, of so many tokens each."""

    n_rows: int
    n_tokens: int


def row_buckets(n_slots: int) -> tuple[int, ...]:
    """List the decode batch sizes of an engine: 1, 2, 4, … and n_slots itself.

    Doubling keeps padding under one half. A full house is common, so n_slots never pads.
    """
    buckets = [1]
    while buckets[-1] * 2 < n_slots:
        buckets.append(buckets[-1] * 2)
    return tuple(buckets) if n_slots == 1 else (*buckets, n_slots)


def chunk_buckets(ctx: int, prefill_quantum: int, mixed_quantum: int) -> tuple[int, ...]:
    """List the prefill chunk lengths, in tokens, ascending.

    Both quanta are always there, because most chunks are exactly that long; 128, 512, … below them serve short
    prompts and the ends of long ones. Nothing is longer than ctx: a longer chunk could not be fed.
    """
    lengths = {prefill_quantum, mixed_quantum}
    length = _SMALLEST_CHUNK
    while length < max(prefill_quantum, mixed_quantum):
        lengths.add(length)
        length *= _CHUNK_GROWTH
    return tuple(sorted({min(length, ctx) for length in lengths}))


def pack_buckets(n_slots: int, ctx: int, prefill_quantum: int, mixed_quantum: int) -> tuple[PrefillShape, ...]:
    """List the shapes of prefill launches that take pieces of several prompts, ascending.

    Their pieces are as long as the shortest chunk: so few tokens choose nearly every expert already, and an accelerator reads hardly more
    weights for four times as many. All rows together have no more tokens than the longest chunk, which so bounds every launch: its time,
    for which those who decode stand still, and its scratch. A shape without slots for half of its rows is left out.
    """
    n_tokens = min(_SMALLEST_CHUNK, mixed_quantum, ctx)
    most = min(n_slots, prefill_quantum // n_tokens)
    return tuple(PrefillShape(min(n, most), n_tokens) for n in _PACK_ROWS if 1 < most and n <= 2 * most)


def fullest(packs: Sequence[PrefillShape], n: int) -> PrefillShape | None:
    """Find the largest shape of which n rows fill at least a half; None where there is none for two rows or more."""
    return next((pack for pack in reversed(packs) if 1 < n and pack.n_rows <= 2 * n), None)


def prefill_shape(lengths: Sequence[int], chunks: Sequence[int], packs: Sequence[PrefillShape]) -> PrefillShape:
    """Find the smallest shape that holds pieces of these lengths, in tokens. Raises ValueError as `nearest` does."""
    longest = max(lengths)
    if len(lengths) == 1:
        return PrefillShape(1, nearest(chunks, longest))
    for pack in packs:
        if len(lengths) <= pack.n_rows and longest <= pack.n_tokens:
            return pack
    raise ValueError(f"no shape of {tuple(map(tuple, packs))} holds {len(lengths)} pieces of up to {longest} tokens")


def nearest(buckets: Sequence[int], n: int) -> int:
    """Find the smallest bucket that holds n.

    Raises ValueError when none does: the caller has planned a batch for which no program exists.
    """
    for bucket in buckets:
        if bucket >= n:
            return bucket
    raise ValueError(f"no bucket of {tuple(buckets)} holds {n}; plan at most {buckets[-1]}")
