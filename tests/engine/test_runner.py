"""The runner's promises about rows: who writes where, what a row's result depends on, and that nothing is compiled twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from ds4jax import Engine
from ds4jax.config import EngineConfig
from ds4jax.errors import StaleCacheError
from ds4jax.model.cache import KVCache, copy_slot, export_slot, import_slot
from ds4jax.serving.engine import batch
from ds4jax.serving.engine.api import SamplingParams
from ds4jax.serving.engine.device import Chunk, Row
from ds4jax.serving.engine.local import engine_shapes, program_directory
from ds4jax.serving.engine.programs import Program, ProgramStore, SlotState, prefill_key
from ds4jax.serving.engine.runner import DeviceCache, Runner
from tests.model.oracle import SMOOTH, TOLERANCE

GREEDY = SamplingParams(temperature=0.0, seed=0)
TOKENS = SMOOTH.run(600).tokens


@pytest.fixture(scope="module")
def loaded(engines: Callable[[str], Engine]) -> Iterator[tuple[Runner, list[Program]]]:
    """A second runner of the shapes that the engine of the set has compiled."""
    first = engines(SMOOTH.name).runner
    found: list[Program] = []
    yield Runner(first.model, first.shapes, ProgramStore(program_directory()), found.append), found


@pytest.fixture
def runner(loaded: tuple[Runner, list[Program]]) -> Runner:
    """A runner whose slot s holds the first 20 + 9 s tokens, each slot from another place in the sequence."""
    runner = loaded[0]
    for slot in range(runner.n_slots):
        runner.clear(slot)
        feed(runner, slot, TOKENS[slot : 20 + 10 * slot])
    return runner


def feed(runner: Runner, slot: int, tokens: Sequence[int]) -> np.ndarray:
    """Prefill a slot in chunks; the last logits [V]."""
    size = runner.prefill_buckets[-1]
    for first in range(0, len(tokens), size):
        step = runner.prefill([Chunk(slot, tokens[first : first + size], GREEDY)])
    return step.logits()[0]


def snapshot(runner: Runner) -> SlotState:
    """Copy what the slots hold to the host, and leave it in place."""
    leaves = runner._cache.take("snapshot")
    host = [np.array(leaf) for leaf in leaves]
    runner._cache = DeviceCache(leaves)
    return jax.tree.unflatten(jax.tree.structure(runner.shapes.abstract_state()), host)


def restore(runner: Runner, state: SlotState) -> None:
    runner._cache = DeviceCache(tuple(jax.device_put(jax.tree.leaves(state), may_alias=False)))


def one_slot(state: SlotState, slot: int) -> tuple[Any, ...]:
    """All that a slot holds."""
    drawing = state.adjustments
    return export_slot(state.cache, slot), drawing.seen[slot], drawing.bias[slot], drawing.number[:, slot], drawing.since[:, slot]


def same_bits(a: Any, b: Any) -> bool:
    return all(np.array(x).tobytes() == np.array(y).tobytes() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def changed_slots(before: SlotState, after: SlotState) -> set[int]:
    return {s for s in range(before.cache.n_slot) if not same_bits(one_slot(before, s), one_slot(after, s))}


# ---------------------------------------------------------------- rows nobody uses
@pytest.mark.parametrize("slots", [[7], [3, 12, 9], [15, 0, 1, 2, 3, 4, 5, 6, 8]])
def test_a_decode_step_changes_the_slots_of_its_rows_alone(runner: Runner, slots: list[int]) -> None:
    before = snapshot(runner)
    runner.decode([Row(s, 5, GREEDY) for s in slots]).tokens()
    assert changed_slots(before, snapshot(runner)) == set(slots)


def test_a_prefill_step_changes_its_slot_alone_and_no_row_past_its_tokens(runner: Runner) -> None:
    first = snapshot(runner)
    runner.prefill([Chunk(6, TOKENS[:5], GREEDY)]).tokens()
    second = snapshot(runner)
    assert changed_slots(first, second) == {6}
    before, after = first.cache, second.cache
    assert after.position[6] == before.position[6] + 5
    ring, n = np.asarray(after.raw.parts["x"][:, 6]), before.raw.n_row
    touched = {r for r in range(n) if (ring[:, r] != np.asarray(before.raw.parts["x"][:, 6, r])).any()}
    assert touched == {int(before.position[6] + i) % n for i in range(5)}


# ---------------------------------------------------------------- row independence
@pytest.mark.parametrize("bucket", [4, 16])
def test_logits_are_bit_equal_whatever_the_index_and_the_neighbours(runner: Runner, bucket: int) -> None:
    start = snapshot(runner)
    others = [s for s in range(runner.n_slots) if s != 5]
    seen = []
    for index, neighbours in ((0, others[: bucket - 2]), (2, others[2 : bucket + 1]), (bucket // 2, others[::-1][: bucket // 2])):
        restore(runner, start)
        slots = [*neighbours[:index], 5, *neighbours[index:]]
        assert bucket // 2 < len(slots) <= bucket
        step = runner.decode([Row(s, TOKENS[100] if s == 5 else s + 1, GREEDY) for s in slots])
        seen.append(step.logits()[slots.index(5)])
    assert seen[0].tobytes() == seen[1].tobytes() == seen[2].tobytes()


@pytest.mark.parametrize("n_tokens", [1, 9, 16])
def test_a_packed_prompt_has_the_same_bits_whatever_its_row_and_its_neighbours(runner: Runner, n_tokens: int) -> None:
    """Alone in the shape, among others as long and as short, at any place; and what it leaves in its slot is the same, too."""
    start, (pack,) = snapshot(runner), runner.pack_buckets
    mine, seen = Chunk(5, TOKENS[100 : 100 + n_tokens], GREEDY), []
    for before, after in ((0, 0), (0, 3), (1, 2), (3, 0), (2, 0)):
        restore(runner, start)
        others = [Chunk(s, TOKENS[s : s + 1 + (5 * s + 3) % pack.n_tokens], GREEDY) for s in (0, 9, 14)]
        chunks = [*others[:before], mine, *others[before : before + after]]
        control = batch.prefill_control(chunks, pack, runner.n_slots)
        step = runner._launch(prefill_key(pack), control, len(chunks))
        state = snapshot(runner)
        assert changed_slots(start, state) == {chunk.slot for chunk in chunks}
        seen.append((step.logits()[before].tobytes(), one_slot(state, 5)))
    assert all(bits == seen[0][0] and same_bits(left, seen[0][1]) for bits, left in seen[1:])


def test_prompts_are_read_alike_alone_in_packs_and_in_any_pieces(runner: Runner) -> None:
    """Pieces end within windows of 4 and of 128, and beyond the raw window. On a CPU, shapes of one length give the same bits."""
    prompts = [TOKENS[50 * i : 50 * i + n] for i, n in enumerate((61, 40, 7, 29))]
    start, (pack,) = snapshot(runner), runner.pack_buckets
    whole = [feed(runner, slot, prompt) for slot, prompt in enumerate(prompts)]

    def read(size: int, most: int) -> list[np.ndarray]:
        """Prefill all prompts in pieces of a size, so many prompts at a time; the last logits [V] of each."""
        restore(runner, start)
        done, last = [0] * 4, [np.empty(0)] * 4
        while waiting := [slot for slot in range(4) if done[slot] < len(prompts[slot])][:most]:
            chunks = [Chunk(slot, prompts[slot][done[slot] : done[slot] + size], GREEDY) for slot in waiting]
            logits = runner.prefill(chunks).logits()
            for row, slot in enumerate(waiting):
                done[slot] += len(chunks[row].tokens)
                last[slot] = logits[row]
        return last

    alone = read(pack.n_tokens, 1)
    for size, most in ((pack.n_tokens, 4), (7, 4), (7, 1)):
        assert [a.tobytes() for a in read(size, most)] == [a.tobytes() for a in alone]
    for a, b in zip(alone, whole, strict=True):
        assert np.abs(a - b).max() <= TOLERANCE and a.argmax() == b.argmax()


def test_buckets_agree_bit_for_bit(runner: Runner) -> None:
    """On a CPU; see `ds4jax.model.sums`. Six steps close a window of 4, and what they leave in the slots is the same, too."""
    start, seen = snapshot(runner), []
    slots = [5, *(s for s in range(16) if s != 5)]
    for n in (1, 2, 3, 5, 16):
        restore(runner, start)
        logits = [runner.decode([Row(s, 9 + i, GREEDY) for s in slots[:n]]).logits()[0].tobytes() for i in range(6)]
        seen.append((logits, one_slot(snapshot(runner), 5)))
    assert all(logits == seen[0][0] and same_bits(left, seen[0][1]) for logits, left in seen[1:])


def test_a_step_is_pure(runner: Runner) -> None:
    start, weights = snapshot(runner), [np.array(leaf).tobytes() for leaf in runner.model.flat.leaves]
    results = []
    for _ in range(2):
        restore(runner, start)
        step = runner.decode([Row(2, 3, GREEDY), Row(4, 3, GREEDY), Row(11, 8, GREEDY)])
        results.append((step.logits().tobytes(), snapshot(runner)))
    assert results[0][0] == results[1][0] and same_bits(results[0][1], results[1][1])
    assert [np.array(leaf).tobytes() for leaf in runner.model.flat.leaves] == weights


# ---------------------------------------------------------------- slots as things
def test_a_copied_or_moved_slot_continues_bit_for_bit(runner: Runner) -> None:
    state = snapshot(runner)
    cache: KVCache = state.cache
    cache = copy_slot(jax.tree.map(jax.numpy.asarray, cache), 8, 1)
    cache = import_slot(cache, export_slot(cache, 8), 13)
    restore(runner, dataclasses.replace(state, cache=cache))
    for _ in range(6):  # across the end of a window of 4
        logits = runner.decode([Row(s, 17, GREEDY) for s in (8, 1, 13)]).logits()
        assert logits[0].tobytes() == logits[1].tobytes() == logits[2].tobytes()
    after = snapshot(runner).cache
    assert same_bits(export_slot(after, 8), export_slot(after, 1)) and same_bits(export_slot(after, 8), export_slot(after, 13))


def test_a_cleared_slot_is_as_new(runner: Runner) -> None:
    runner.clear(9)
    after = feed(runner, 9, TOKENS[:50])
    runner.clear(2)
    assert feed(runner, 2, TOKENS[:50]).tobytes() == after.tobytes()
    assert same_bits(one_slot(snapshot(runner), 9), one_slot(snapshot(runner), 2))


# ---------------------------------------------------------------- programs
def test_a_second_start_compiles_nothing(loaded: tuple[Runner, list[Program]]) -> None:
    runner, found = loaded
    assert [p.key for p in found] == list(runner.shapes.keys)
    assert all(p.from_disk for p in found) and runner.compile_misses == 0


def test_only_kernels_take_packs_of_many_rows(runner: Runner) -> None:
    plain, kernels = (dataclasses.replace(runner.shapes.spec, kernels=kernels) for kernels in (False, True))
    assert engine_shapes(plain, EngineConfig(slots=64)).pack_buckets == ((4, 128),)
    assert engine_shapes(kernels, EngineConfig(slots=64)).pack_buckets == ((4, 128), (16, 128))


def test_a_damaged_stored_program_is_compiled_again(loaded: tuple[Runner, list[Program]], tmp_path: object) -> None:
    store = ProgramStore(tmp_path)  # type: ignore[arg-type]
    shapes = loaded[0].shapes
    first = store.get(shapes, ("clear", 0))
    store.path(shapes, ("clear", 0)).write_bytes(b"rubbish")  # type: ignore[union-attr]
    second, third = store.get(shapes, ("clear", 0)), store.get(shapes, ("clear", 0))
    assert [first.from_disk, second.from_disk, third.from_disk] == [False, False, True]


def test_warm_up_and_real_steps_share_their_constructor(loaded: tuple[Runner, list[Program]], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded[0]
    made: list[tuple[str, tuple[int, ...], str]] = []

    def spy(name: str, make: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def control(*args: object) -> np.ndarray:
            result = make(*args)
            made.append((name, result.shape, str(result.dtype)))
            return result

        return control

    for name in ("decode_control", "prefill_control"):
        monkeypatch.setattr(batch, name, spy(name, getattr(batch, name)))
    runner._warm_up()
    warm = set(made)
    made.clear()
    assert len(warm) == len(runner.decode_buckets) + len(runner.prefill_buckets) + len(runner.pack_buckets)
    for n in range(1, 17):
        runner.decode([Row(s, 1, GREEDY) for s in range(n)]).tokens()
    for n in (1, 16, 17, 64):
        runner.prefill([Chunk(0, TOKENS[:n], GREEDY)]).tokens()
    for n in range(2, runner.pack_buckets[-1].n_rows + 1):
        runner.prefill([Chunk(s, TOKENS[: s + 1], GREEDY) for s in range(n)]).tokens()
    assert set(made) <= warm


def test_a_consumed_cache_says_which_step_has_it() -> None:
    cache = DeviceCache((jax.numpy.zeros(3),))
    cache.take("decode[4]")
    with pytest.raises(StaleCacheError, match=r"consumed by decode\[4\]"):
        cache.take("prefill[64]")


def test_a_step_that_fails_midway_leaves_no_cache_to_misuse(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    program = runner.programs["decode", 1]

    def nested(*args: object) -> object:
        runner.clear(0)  # while decode[1] holds the cache
        return program.executable(*args)

    monkeypatch.setitem(runner.programs, ("decode", 1), dataclasses.replace(program, executable=nested))
    with pytest.raises(Exception, match=r"consumed by decode\[1\]"):
        runner.decode([Row(0, 1, GREEDY)])
