"""Padded shapes: how many rows or tokens a compiled program takes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

_SMALLEST_CHUNK = 128
_CHUNK_GROWTH = 4


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


def nearest(buckets: Sequence[int], n: int) -> int:
    """Find the smallest bucket that holds n.

    Raises ValueError when none does: the caller has planned a batch for which no program exists.
    """
    for bucket in buckets:
        if bucket >= n:
            return bucket
    raise ValueError(f"no bucket of {tuple(buckets)} holds {n}; plan at most {buckets[-1]}")
