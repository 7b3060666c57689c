"""A slot that goes to the host piece by piece and comes back has the bits of a cold run, whatever lay in its new place, beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from ds4jax import Engine
from ds4jax.config import KVPolicy
from ds4jax.model import transfer
from ds4jax.serving.engine.kvstore import Draft, Reason
from ds4jax.serving.engine.programs import TRANSFER_KEYS, Key, Program, ProgramStore
from ds4jax.serving.engine.runner import Runner
from ds4jax.serving.engine.saved import open_saved, token_texts
from ds4jax.text.dsml import ReplayMemory, ToolCall
from tests.engine.test_reuse import ask, tokens
from tests.engine.test_snapshots_exact import BESIDE, COLD, MORE, OTHER, TOKENS, contents, continued, feed
from tests.model.oracle import SMOOTH, engine_config

CUTS = (1, 3, 4, 5, 63, 64, 127, 128, 129, 255, 256, 257, 384, 600 - MORE)
SAVED, LOADED = 1, 2


@pytest.fixture(scope="module")
def small_pieces(own_runner: Runner) -> dict[Key, Program]:
    """Programs for pieces of a fifth of a slot. Nobody else may find them on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "PIECE_TOKENS", 128)
        return {key: ProgramStore(None).get(own_runner.shapes, key) for key in TRANSFER_KEYS}


@pytest.fixture
def runner(own_runner: Runner, small_pieces: dict[Key, Program], monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(transfer, "PIECE_TOKENS", 128)
    monkeypatch.setattr(own_runner, "programs", own_runner.programs | small_pieces)
    return own_runner


def exported(runner: Runner, slot: int, n_tokens: int) -> dict[str, np.ndarray]:
    """A session as a file holds it."""
    pieces = [runner.export_rows(slot, piece, n_tokens) for piece in range(runner.n_pieces(n_tokens))]
    rows = [piece.arrays() for piece in pieces]
    return {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}


@pytest.mark.parametrize("cut", CUTS)
def test_save_and_load_give_the_bits_of_a_cold_run(runner: Runner, cut: int) -> None:
    for slot in (COLD, SAVED, LOADED, BESIDE):
        runner.clear(slot)
    feed(runner, BESIDE, OTHER[:41])
    more = TOKENS[cut : cut + MORE]
    feed(runner, COLD, TOKENS[:cut])
    feed(runner, SAVED, TOKENS[:cut])
    state = runner.export_state(SAVED)
    cold = continued(runner, COLD, more)
    assert continued(runner, SAVED, more) == cold
    arrays = exported(runner, SAVED, cut) | state.arrays()  # rows are copied when the session has gone on

    parts = runner.session_parts(cut)
    assert {part.name: (part.dtype, part.shape) for part in parts} == {name: (str(a.dtype), a.shape) for name, a in arrays.items()}

    feed(runner, LOADED, OTHER[:300])
    runner.clear(LOADED)
    beside = contents(runner, BESIDE)
    for piece in range(runner.n_pieces(cut)):
        runner.import_rows(LOADED, piece, arrays)
    runner.import_state(LOADED, cut, arrays)
    assert contents(runner, BESIDE) == beside
    assert continued(runner, LOADED, more) == cold
    assert runner.compile_misses == 0


@pytest.mark.parametrize("n_tokens", [1, 127, 128, 129, 255, 256, 500, 639])
def test_a_file_does_not_say_how_much_its_slot_could_hold(runner: Runner, n_tokens: int) -> None:
    """Pieces of a slot that ends within one overlap; what is cut from them follows one another all the same."""
    capacity = {"comp4.x": 160, "comp128.x": 5}
    rng = np.random.default_rng(n_tokens)
    arrays = {"comp4.x": rng.random((n_tokens // 4, 2, 3)), "comp128.x": rng.random((n_tokens // 128, 1, 3))}
    slot = {name: np.zeros((n_row, *arrays[name].shape[1:])) for name, n_row in capacity.items()}
    for piece in range(transfer.n_pieces(n_tokens)):
        for name, rows in transfer.rows_of_piece(arrays, capacity, piece).items():
            n, first = transfer._extent(capacity[name], transfer._ratio(name), piece)
            assert len(rows) == n
            slot[name][first : first + n] = rows
    back = []
    for piece in range(transfer.n_pieces(n_tokens)):
        whole = {}
        for name in capacity:
            n, first = transfer._extent(capacity[name], transfer._ratio(name), piece)
            whole[name] = slot[name][first : first + n]
        back.append(transfer.live_rows(whole, capacity, piece, n_tokens))
    for name, array in arrays.items():
        assert np.array_equal(np.concatenate([rows[name] for rows in back]), array)


# ---------------------------------------------------------------- engines
POLICY = KVPolicy(min_tokens=32, cold_max_tokens=300, continued_interval_tokens=192, boundary_trim_tokens=4, boundary_align_tokens=64)


def test_engines_that_share_a_folder_go_on_from_one_another(engines: Callable[[str], Engine], tmp_path: Path) -> None:
    """Beside a neighbour the very tokens, and alone the very bits, of the one that had computed all of it."""
    prompt, other = np.random.default_rng(11).integers(8, 512, (2, 200)).tolist()
    model, config = SMOOTH.load(), replace(engine_config(SMOOTH.name), snapshots=0)
    with Engine(model, config=config, kv_disk=tmp_path, kv_policy=POLICY) as second:
        with Engine(model, config=config, kv_disk=tmp_path, kv_policy=POLICY) as first:
            ((_, cold),) = ask(first, prompt)
            wait_for(lambda: first.stats().saves == {"cold": 1})
            (n_beside, _), (n_loaded, loaded) = ask(second, other, prompt)
            assert (n_beside, n_loaded) == (0, 192) and tokens(loaded) == tokens(cold)
            ((n_alone, alone),) = ask(second, prompt)
            assert n_alone == 192 and alone == cold, "chunks end where they did, so the bits are equal"
        ((n_cached, _),) = ask(second, [*prompt, *tokens(cold)[:-1], 9, 8, 7])
        assert n_cached == len(prompt) + len(cold) - 1 and second.stats().compile_misses == 0


def test_calls_of_tools_are_remembered_with_the_session_that_has_them(tmp_path: Path) -> None:
    model = SMOOTH.load()
    texts = token_texts(model.tokenizer)
    block = "\n\n<｜DSML｜tool_calls><｜DSML｜invoke name='x'></｜DSML｜invoke></｜DSML｜tool_calls>"
    call = ToolCall("id1", "x", "{}")
    tokens = model.tokenizer.encode_rendered(f"Some text that is long enough.{block} and more" * 3)
    memory = ReplayMemory()
    memory.remember(block, [call])
    memory.remember(block.replace("x", "y"), [ToolCall("id2", "y", "{}")])
    saved = open_saved(tmp_path, model, texts, 640, POLICY, memory)
    assert saved is not None
    text = texts.read(tokens).text
    assert saved.store.save_all(Draft(tokens, (), 640, Reason.EVICT, text, saved.replay(text)), ()).result(30)
    other = ReplayMemory()
    open_saved(tmp_path, model, texts, 640, POLICY, other)
    assert other.recall([call]) == block and other.recall([ToolCall("id2", "y", "{}")]) is None


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for what other threads bring about."""
    for _ in range(4000):
        if condition():
            return
        sleep(0.005)
    raise AssertionError("it never came true")
