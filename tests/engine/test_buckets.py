"""Padded shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.serving.engine.buckets import chunk_buckets, nearest, row_buckets


@pytest.mark.parametrize(
    ("n_slots", "expected"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (16, (1, 2, 4, 8, 16)), (33, (1, 2, 4, 8, 16, 32, 33))],
)
def test_row_buckets_double_up_to_all_slots(n_slots: int, expected: tuple[int, ...]) -> None:
    assert row_buckets(n_slots) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((32768, 2048, 128), (128, 512, 2048)),
        ((1000, 2048, 128), (128, 512, 1000)),
        ((20, 2048, 128), (20,)),
        ((64, 16, 4), (4, 16)),
    ],
)
def test_chunk_buckets_hold_both_quanta_within_the_context(args: tuple[int, int, int], expected: tuple[int, ...]) -> None:
    assert chunk_buckets(*args) == expected


@given(st.integers(1, 4096), st.integers(1, 5000), st.integers(1, 5000))
def test_every_planned_chunk_has_a_bucket(ctx: int, quantum: int, mixed: int) -> None:
    buckets = chunk_buckets(ctx, quantum, mixed)
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] <= ctx
    for n in (min(quantum, ctx), min(mixed, ctx)):
        assert nearest(buckets, n) == n


def test_nearest_rounds_up_and_refuses_what_nothing_holds() -> None:
    assert [nearest((1, 2, 4, 6), n) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    with pytest.raises(ValueError, match="no bucket of .* holds 7"):
        nearest((1, 2, 4, 6), 7)
