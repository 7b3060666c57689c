"""Choice of slots."""

from collections.abc import Sequence

import pytest

from ds4jax.serving.engine.session import Session
from ds4jax.serving.engine.slots import Choice, SlotTable


def table_with(*histories: Sequence[int] | None) -> SlotTable:
    """Free slots that were left in this order with these contents."""
    table = SlotTable(len(histories))
    for slot in range(len(histories)):
        table.take(Choice(slot, 0, False), Session(slot, 64))
    for slot, history in enumerate(histories):
        table.release(slot, history)
    return table


@pytest.mark.parametrize(
    ("histories", "prompt", "expected"),
    [
        (([], []), [1, 2], Choice(0, 0, False)),
        (([1], [1, 2], [1, 2, 9]), [1, 2, 3], Choice(1, 2, False)),  # the longest whole prefix
        (([1, 9], []), [1, 2, 3], Choice(1, 0, False)),  # overlap alone draws nobody
        (([1, 2, 3], []), [1, 2, 3], Choice(1, 0, False)),  # one token must be left to feed
        (([5], [6], [7]), [1, 2], Choice(0, 0, True)),  # the least recently used
        (([5], None), [1, 2], Choice(1, 0, True)),  # damaged: nothing to lose, but to be cleared
    ],
)
def test_choice(histories: Sequence[Sequence[int] | None], prompt: Sequence[int], expected: Choice) -> None:
    choice = table_with(*histories).choose(prompt)
    assert choice is not None and choice[:3] == expected[:3]


def test_taken_slots_are_not_chosen_and_all_taken_is_none() -> None:
    table = table_with([1], [1, 2])
    table.take(Choice(1, 2, False), Session(1, 64))
    assert table.choose([1, 2, 3]) == Choice(0, 1, False, parts_at=1)
    table.take(Choice(0, 1, False), Session(2, 64))
    assert table.choose([1, 2, 3]) is None
    assert [session.id for session in table.residents()] == [2, 1]


def test_a_lost_cache_leaves_nothing_to_continue() -> None:
    table = table_with([1, 2])
    table.forget()
    assert table.choose([1, 2, 3]) == Choice(0, 0, True)
