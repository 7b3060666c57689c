"""kv_quant="ds4": rows in FP8, indexer in FP4, as the weights were trained with. Against ds4's own logits, and its size."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from ds4jax.config import FLASH
from ds4jax.model.cache import init_cache
from tests.model.oracle import LENGTHS, SMOOTH, AllLogits

SURE_MARGIN = 2e-2  # rounding may swap best tokens that are closer than this
# Rounding amplifies the last bits of a sum: ds4's arithmetic, summed in another order, differs from itself by nearly as much.
P99, WORST, RMS = 3e-2, 8e-2, 1e-2


@pytest.fixture(scope="module")
def logits() -> AllLogits:
    return AllLogits(SMOOTH.load(kv_quant="ds4"))


@pytest.mark.parametrize("n", LENGTHS)
def test_logits_are_ds4s(logits: AllLogits, n: int) -> None:
    run = SMOOTH.run(n)
    with np.load(SMOOTH.path.with_suffix(".ds4.npz")) as arrays:
        want = arrays[f"len{n}_ds4_float_logits"]
    got = logits(run.tokens)[run.positions]
    distance = np.abs(got - want)
    if n == 5:
        assert distance.max() <= 2e-4
    assert np.quantile(distance, 0.99) <= P99 and distance.max() <= WORST and np.sqrt(np.mean(distance**2)) <= RMS
    second, first = np.sort(want, axis=1)[:, -2:].T
    sure = first - second > SURE_MARGIN
    np.testing.assert_array_equal(got.argmax(1)[sure], want.argmax(1)[sure])
    assert np.abs(got - run.logits).max() > 1e-2, "the rounding has no effect"


def test_bytes_a_token_of_flash() -> None:
    """A token costs 21 ratio-4 layers (583 B and 68 B a row) and 20 ratio-128 layers (583 B a row): 3 509 B, half of 16-bit rows."""

    def nbytes(n_ctx: int, kv_quant: str) -> int:
        shapes = jax.eval_shape(partial(init_cache, FLASH, 1, n_ctx, kv_quant, "bfloat16"))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    assert (nbytes(2 << 16, "ds4") - nbytes(1 << 16, "ds4")) / (1 << 16) == 21 * (583 + 68) / 4 + 20 * 583 / 128
    assert round((nbytes(2 << 16, "ds4") - nbytes(1 << 16, "ds4")) / (1 << 16)) == 3509
    assert (nbytes(2 << 16, "none") - nbytes(1 << 16, "none")) / (1 << 16) == 6880
