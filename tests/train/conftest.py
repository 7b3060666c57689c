"""Training runs under JAX's own rules for mixed types: optax relies on them."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

RULES = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}


@pytest.fixture(scope="module", autouse=True)
def mixed_types() -> Iterator[None]:
    """Set the rules for all threads (a context manager would do it for one), and put the strict ones back."""
    before = {name: getattr(jax.config, name) for name in RULES}
    for name, rule in RULES.items():
        jax.config.update(name, rule)
    yield
    for name, rule in before.items():
        jax.config.update(name, rule)
