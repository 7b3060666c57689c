"""What holds for any form of the experts' products: a token's result is its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray]  # x [T, D], weights [T, X] and experts [T, X] of the choices
Example = Callable[..., Inputs]
Apply = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def check_company(example: Example, apply: Apply, n_token: int, n_expert: int, seed: int, n_chosen: int) -> None:
    """Move a token among others, of which some choose nobody: its result keeps every bit."""
    x, weight, expert = example(n_token, seed)
    other_x, other_weight, other_expert = example(n_token, seed + 1)
    other_expert = np.where(other_expert < n_chosen, other_expert, n_expert)
    old, new = np.random.default_rng(seed).integers(0, n_token, 2)
    for there, here in ((other_x, x), (other_weight, weight), (other_expert, expert)):
        there[new] = here[old]
    np.testing.assert_array_equal(apply(other_x, other_weight, other_expert)[new], apply(x, weight, expert)[old])


def check_nan(example: Example, apply: Apply, n_token: int) -> None:
    """Put NaN into a token: all of its result is NaN, and no other token's changes."""
    x, weight, expert = example(n_token)
    clean = apply(x, weight, expert)
    x[1, 5] = np.nan
    got = apply(x, weight, expert)
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(clean, 1, 0))
