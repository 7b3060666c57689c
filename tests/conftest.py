"""Settings that every test runs under. They must be in place before jax is first imported."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Silent promotion hides wrong arithmetic (a float64 or bfloat16 that creeps in, a [B] that broadcasts as [T]).
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

_compilation_cache = tempfile.TemporaryDirectory(prefix="ds4jax-test-jax-", ignore_cleanup_errors=True)
# Tests of different files compile the same little programs; child processes inherit the directory too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compilation_cache.name)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Return the folder of files that tests read."""
    return Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session", autouse=True)
def _remove_compilation_cache() -> Iterator[None]:
    yield
    _compilation_cache.cleanup()
