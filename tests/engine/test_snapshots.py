"""The books of the pool of snapshots, against a model that simply remembers every token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds4jax.serving.engine.prefix import common_prefix
from ds4jax.serving.engine.snapshots import Found, SnapshotPool

N_SLOTS = 3
Tokens = tuple[int, ...]


def never(home: int) -> bool:
    return False


def test_a_fork_is_a_home_of_what_it_was_made_of_and_of_nothing_it_held_before() -> None:
    pool = SnapshotPool(4)
    pool.add(0, 5, never)
    pool.add(1, 3, never)
    pool.add(0, 9, never)
    pool.fork(0, 1, 5)
    assert pool.find([0, 5, 0]) == Found(0, 5, frozenset({1}))
    assert pool.find([0, 4, 0]) is None
    pool.cut(0, 0)
    assert len(pool) == 1  # the fork alone has the rows of the first


def test_what_a_session_kept_before_it_went_wrong_is_gone_for_its_forks_too() -> None:
    pool = SnapshotPool(4)
    pool.add(0, 5, never)
    pool.add(0, 9, never)
    pool.fork(0, 1, 9)
    pool.distrust(0, 5)
    assert pool.find([20, 20, 20]) == Found(0, 5, frozenset({0, 1}))


def test_shared_ones_are_pinned_up_to_half_of_the_pool() -> None:
    pool = SnapshotPool(4)
    places = [pool.add(0, position, never, is_shared=position < 3) for position in range(1, 5)]
    assert [pool.add(0, position, never) for position in (5, 6, 7)] == [places[2], places[3], places[2]]
    assert pool.add(0, 8, never, is_shared=True) == places[3]
    assert pool.add(0, 9, never) == places[0]  # three of four are shared now: the oldest of all goes


def test_a_pool_without_places_keeps_nothing() -> None:
    assert SnapshotPool(0).add(0, 5, never) is None


class Truth:
    """Slots and snapshots that know their tokens."""

    def __init__(self, n_entry: int) -> None:
        self.pool = SnapshotPool(n_entry)
        self.slots: list[Tokens] = [()] * N_SLOTS
        self.kept: dict[int, Tokens] = {}

    def feed(self, slot: int, tokens: Tokens) -> None:
        self.slots[slot] += tokens

    def cut(self, slot: int, position: int) -> None:
        self.slots[slot] = self.slots[slot][:position]
        self.pool.cut(slot, position)

    def keep(self, slot: int) -> None:
        mine = self.slots[slot]
        entry = self.pool.add(slot, len(mine), lambda home: self.slots[home][: len(mine)] == mine)
        if entry is not None:
            self.kept[entry] = mine

    def fork(self, source: int, target: int, position: int) -> None:
        if source != target:
            self.slots[target] = self.slots[source][:position]
            self.pool.fork(source, target, len(self.slots[target]))

    def check(self, prompt: Tokens) -> None:
        """Whatever is found is a beginning of the prompt, and its homes hold it."""
        found = self.pool.find([common_prefix(prompt, held, len(prompt)) for held in self.slots])
        if found is not None:
            tokens = self.kept[found.entry]
            assert tokens == prompt[: found.position]
            assert all(self.slots[home][: found.position] == tokens for home in found.homes)


SLOT, SHORT = st.integers(0, N_SLOTS - 1), st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)
ACTION = st.one_of(
    st.tuples(st.just("feed"), SLOT, SHORT),
    st.tuples(st.just("cut"), SLOT, st.integers(0, 8)),
    st.tuples(st.just("keep"), SLOT),
    st.tuples(st.just("keep"), SLOT),
    st.tuples(st.just("fork"), SLOT, SLOT, st.integers(1, 8)),
)


@given(st.integers(1, 6), st.lists(ACTION, max_size=30))
def test_what_is_found_is_what_the_slots_hold(n_entry: int, actions: list[tuple]) -> None:  # type: ignore[type-arg]
    truth = Truth(n_entry)
    for name, *arguments in actions:
        getattr(truth, name)(*arguments)
        for held in [*truth.slots, *truth.kept.values()]:
            truth.check(held)
    assert len(truth.pool) <= n_entry
