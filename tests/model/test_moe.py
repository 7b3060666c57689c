"""The two ways to apply experts on a CPU agree to the last bit, so that it never shows which one a bucket takes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.model import moe, quant
from tests.compiler import run_as_users_do
from tests.model.test_quant import random_weight

N_LAYER, N_EXPERT, N_USED, D, F = 2, 6, 2, 512, 256


@pytest.mark.parametrize("kinds", [("IQ2_XXS", "IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K", "Q4_K"), ("MXFP4", "Q6_K", "Q3_K")])
@pytest.mark.parametrize("m", [2, 33])
def test_all_experts_and_the_chosen_ones_give_the_same_bits(kinds: tuple[str, str, str], m: int) -> None:
    shapes = (F, D), (F, D), (D, F)
    weights = [random_weight(kind, (N_LAYER, N_EXPERT, *shape)) for kind, shape in zip(kinds, shapes, strict=True)]
    rng = np.random.default_rng(m)
    x = rng.normal(size=(m, D)).astype(np.float32)
    weight = rng.uniform(0.1, 1, (m, N_USED)).astype(np.float32)
    chosen = np.stack([rng.choice(N_EXPERT, N_USED, replace=False) for _ in range(m)]).astype(np.int32)
    chosen[m // 2] = N_EXPERT  # padding
    args = x, weight, chosen, weights, jnp.int32(1)
    one_by_one, together = (np.asarray(run_as_users_do(partial(way, clamp=7.0), *args)) for way in (moe.chosen_only, moe.all_of_them))
    assert one_by_one.tobytes() == together.tobytes()
    assert not together.reshape(m, N_USED, D)[m // 2].any()
    w1, w3, w2 = (np.asarray(quant.dequantize(quant.take_layer(w, 1)), np.float64) for w in weights)
    e, row = chosen[0, 0], x[0].astype(np.float64)
    gate, up = np.minimum(w1[e] @ row, 7), np.clip(w3[e] @ row, -7, 7)
    exact = w2[e] @ (gate / (1 + np.exp(-gate)) * up * weight[0, 0])
    np.testing.assert_allclose(together[0], exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def test_few_packed_experts_are_applied_together_and_others_as_chosen() -> None:
    def fits(kind: str, n_expert: int, n_row: int) -> bool:
        return moe.suits_all([quant.abstract(kind, (1, n_expert, 256, 256))] * 3, n_row)

    assert jax.default_backend() == "cpu"
    assert fits("Q4_K", 6, 16) and fits("IQ2_XXS", 8, 2)
    assert not fits("Q4_K", 256, 16) and not fits("Q4_K", 6, 1) and not fits("Q8_0:columns", 6, 16)
