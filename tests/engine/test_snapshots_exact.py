"""Coming back to a snapshot gives the bits of a cold run, across every window and compressor boundary, and leaves neighbours alone."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from ds4jax.serving.engine.api import SamplingParams
from ds4jax.serving.engine.device import Chunk, Row
from ds4jax.serving.engine.programs import SlotState
from ds4jax.serving.engine.runner import DeviceCache, Runner
from tests.model.oracle import SMOOTH

GREEDY = SamplingParams(temperature=0.0, seed=0)
TOKENS = SMOOTH.run(600).tokens
OTHER = TOKENS[::-1]
CUTS = (1, 3, 4, 5, 63, 64, 127, 128, 129, 255, 256, 257, 384)
COLD, REWOUND, FORKED, BESIDE = 0, 1, 2, 3
MORE = 13  # crosses a window of 4 at any cut


def feed(runner: Runner, slot: int, tokens: Sequence[int]) -> np.ndarray:
    """Prefill in chunks; the last logits [V]."""
    size = runner.prefill_buckets[-1]
    for first in range(0, len(tokens), size):
        step = runner.prefill([Chunk(slot, tokens[first : first + size], GREEDY)])
    return step.logits()[0]


def continued(runner: Runner, slot: int, tokens: Sequence[int]) -> list[bytes]:
    """The bits of all logits behind a position: one chunk, then a token at a time."""
    out = [feed(runner, slot, tokens[:-3])]
    out += [runner.decode([Row(slot, token, GREEDY)]).logits()[0] for token in tokens[-3:]]
    return [logits.tobytes() for logits in out]


def contents(runner: Runner, slot: int) -> list[bytes]:
    """All bits of a slot of the cache."""
    leaves = runner._cache.take("look")
    runner._cache = DeviceCache(leaves)
    state: SlotState = jax.tree.unflatten(jax.tree.structure(runner.shapes.abstract_state()), leaves)
    return [np.asarray(leaf[slot] if leaf.ndim == 1 else leaf[:, slot]).tobytes() for leaf in jax.tree.leaves(state.cache)]


@pytest.mark.parametrize("cut", CUTS)
def test_rewind_and_fork_give_the_bits_of_a_cold_run(own_runner: Runner, cut: int) -> None:
    runner = own_runner
    for slot in (COLD, REWOUND, FORKED, BESIDE):
        runner.clear(slot)
    feed(runner, BESIDE, OTHER[:41])
    beside = contents(runner, BESIDE)
    more = TOKENS[cut : cut + MORE]

    feed(runner, COLD, TOKENS[:cut])
    cold = continued(runner, COLD, more)

    feed(runner, FORKED, OTHER[:300])  # what it held before must not show
    feed(runner, REWOUND, TOKENS[:cut])
    runner.save(REWOUND, 1)
    feed(runner, REWOUND, OTHER[:200])  # overwrites rings, windows and the rows behind
    runner.restore(1, REWOUND, FORKED)
    assert continued(runner, FORKED, more) == cold, "fork"
    runner.restore(1, REWOUND, REWOUND)
    assert continued(runner, REWOUND, more) == cold, "rewind"
    assert contents(runner, BESIDE) == beside
    assert runner.compile_misses == 0
