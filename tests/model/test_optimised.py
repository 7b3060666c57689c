"""Bits of a row where the compiler does all that it does for users; most other tests leave its optimiser out (see conftest.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from ds4jax.model.cache import KVCache, export_slot, init_cache
from ds4jax.model.model import load_model
from ds4jax.model.steps import DecodeBatch, decode_step
from tests.model.oracle import AS_USERS
from tests.small_model import write_two_layers

N_ROW, N_STEP = 8, 40
NOBODY = N_ROW


def test_a_row_has_the_same_bits_whatever_its_index_and_its_neighbours(tmp_path: Path) -> None:
    """Slots stand at positions 1 to 40 when they are compared, before and behind the ends of windows."""
    model = load_model(write_two_layers(tmp_path / "m.gguf"), kv_quant="none", dtype="float32")
    flat, spec = model.flat, model.spec

    def step(leaves: Sequence[jax.Array], cache: KVCache, rows: DecodeBatch) -> tuple[jax.Array, KVCache]:
        return decode_step(flat.merge(leaves), cache, rows, spec.compute)

    def rows_of(slots: Sequence[int]) -> DecodeBatch:
        slot = np.int32(slots)
        return DecodeBatch(8 + 3 * slot, slot)  # type: ignore[arg-type]

    cache = init_cache(model.config, N_ROW, 64, spec.kv_quant, spec.dtype)
    program = jax.jit(step).lower(flat.leaves, cache, rows_of(range(N_ROW))).compile(compiler_options=AS_USERS)
    for n in range(N_STEP):
        cache = program(flat.leaves, cache, rows_of([slot if n >= 5 * slot else NOBODY for slot in range(N_ROW)]))[1]

    together = [0, 1, 2, 3, 4, 5, 6, 7]
    logits, after = program(flat.leaves, cache, rows_of(together))
    for slots in (together[::-1], [3, 0, 6, 5, 7, 2, 1, 4], [NOBODY, 5, NOBODY, 2, NOBODY, NOBODY, NOBODY, 7]):
        there, cache_there = program(flat.leaves, cache, rows_of(slots))
        for index, slot in enumerate(slots):
            if slot != NOBODY:
                assert np.asarray(there[index]).tobytes() == np.asarray(logits[slot]).tobytes(), f"slot {slot} in row {index}"
        for slot in together:
            want, got = (export_slot(c, slot) for c in (after if slot in slots else cache, cache_there))
            assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*map(jax.tree.leaves, (want, got)), strict=True))
