"""What is proved of the engine, bits above all, is proved of the programs that users run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compiler import compiled_as_users_do


@pytest.fixture(scope="module", autouse=True)
def as_users() -> Iterator[None]:
    """Compile with the optimiser: these programs run for thousands of steps."""
    with compiled_as_users_do():
        yield
