"""The kernel of top-k and top-p against the array code, and that it lowers for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.model import sampling
from ds4jax.model.kernels.nucleus import nucleus_floor
from tests.model.lowering import lower_for_cuda

V = 3001


def test_it_keeps_what_the_array_code_keeps() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, V)).astype(np.float32) * np.float32([[1], [3], [0.1], [5], [2], [1]])
    weight = np.exp(logits - logits.max(axis=1, keepdims=True))
    weight[5] = np.where(rng.random(V) < 0.5, 0.25, weight[5])  # many equal weights
    weight[5, 7] = 1.0
    top_k, top_p = np.int32([0, 40, 1, 7, V + 5, 100]), np.float32([0.9, 1.0, 0.5, 0.8, 0.05, 0.99])
    got = np.asarray(nucleus_floor(weight, top_k, top_p, np.ones(6, bool)))
    expected = np.asarray(sampling.nucleus_floor(weight, top_k, top_p))
    # Sums in another order may move the edge of top-p by one token.
    kept, wanted = ((weight >= f[:, None]).sum(axis=1) for f in (got, expected))
    assert np.all(np.abs(kept - wanted) <= 1), (kept, wanted)
    np.testing.assert_array_equal(got[1], expected[1])


def test_rows_that_do_not_ask_keep_everything() -> None:
    weight = np.full((2, 50), 0.5, np.float32)
    floors = nucleus_floor(weight, np.int32([5, 5]), np.float32([0.5, 0.5]), np.array([False, True]))
    assert floors[0] == 0.0 and floors[1] == 0.5


def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [
        jax.ShapeDtypeStruct((64, 129280), jnp.float32),
        *(jax.ShapeDtypeStruct((64,), t) for t in (jnp.int32, jnp.float32, jnp.bool_)),
    ]
    assert "nucleus" in lower_for_cuda(monkeypatch, nucleus_floor, *shapes)
