"""How hard the compiler tries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# The same for one program: options of `compile`.
AS_USERS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


@contextmanager
def compiled_as_users_do() -> Iterator[None]:
    """Leave the optimiser on that tests/conftest.py turns off, for all threads."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
