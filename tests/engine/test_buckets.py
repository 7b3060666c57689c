"""Padded shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4jax.serving.engine.buckets import chunk_buckets, fullest, nearest, pack_buckets, prefill_shape, row_buckets


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


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((1, 32768, 2048, 128), ()),
        ((2, 32768, 2048, 128), ((2, 128),)),
        ((4, 32768, 2048, 128), ((4, 128),)),
        ((7, 32768, 2048, 128), ((4, 128),)),
        ((8, 32768, 2048, 128), ((4, 128), (8, 128))),
        ((64, 32768, 2048, 128), ((4, 128), (16, 128))),
        ((64, 32768, 512, 128), ((4, 128),)),  # no launch is longer than the quantum
        ((64, 32768, 128, 128), ()),
        ((64, 32768, 2048, 512), ((4, 128), (16, 128))),
        ((4, 20, 2048, 128), ((4, 20),)),
    ],
)
def test_packs_hold_few_rows_or_many(args: tuple[int, int, int, int], expected: tuple[tuple[int, int], ...]) -> None:
    assert pack_buckets(*args) == expected


@given(st.integers(1, 100), st.integers(2, 4096), st.integers(1, 5000), st.integers(1, 5000))
def test_packs_are_bounded_by_slots_and_quantum(n_slots: int, ctx: int, quantum: int, mixed: int) -> None:
    packs = pack_buckets(n_slots, ctx, quantum, mixed)
    assert list(packs) == sorted(set(packs))
    for pack in packs:
        assert 2 <= pack.n_rows <= n_slots and pack.n_rows * pack.n_tokens <= quantum and pack.n_tokens <= min(mixed, ctx)


def test_the_shape_of_a_launch_holds_it_and_is_half_full() -> None:
    chunks, packs = (128, 512), pack_buckets(16, 4096, 2048, 128)
    assert prefill_shape([130], chunks, packs) == (1, 512)
    for n in range(2, 17):
        shape = fullest(packs, n)
        assert shape is not None and 2 * n >= shape.n_rows
        n_rows = min(n, shape.n_rows)
        assert prefill_shape([128] * n_rows, chunks, packs) == shape
    assert fullest(packs, 1) is None and fullest((), 9) is None
    for lengths in ([1] * 17, [129, 1]):
        with pytest.raises(ValueError, match="no shape of .* holds"):
            prefill_shape(lengths, chunks, packs)
