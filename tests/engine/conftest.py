"""What is proved of the engine, bits above all, is proved of the programs that users run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ds4jax import Engine
from ds4jax.serving.engine.local import program_directory
from ds4jax.serving.engine.programs import ProgramStore
from ds4jax.serving.engine.runner import Runner
from tests.compiler import compiled_as_users_do
from tests.model.oracle import SMOOTH


@pytest.fixture(scope="module", autouse=True)
def as_users() -> Iterator[None]:
    """Compile with the optimiser: these programs run for thousands of steps."""
    with compiled_as_users_do():
        yield


@pytest.fixture(scope="module")
def own_runner(engines: Callable[[str], Engine]) -> Runner:
    """A runner with slots of its own: an engine believes that nobody else writes to the slots of its runner."""
    first = engines(SMOOTH.name).runner
    return Runner(first.model, first.shapes, ProgramStore(program_directory()))
