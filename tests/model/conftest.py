"""How the tests of numbers are compiled."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out most optimisations where interpreted kernels are all that a module runs: compiling is what those cost."""
    name = request.module.__name__.rpartition(".")[2]
    if not (name.startswith("test_kernel") or name in ("test_fused", "test_repack")):
        yield
        return
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
