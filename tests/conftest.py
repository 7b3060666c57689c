"""Settings that every test runs under. They must be in place before jax is first imported."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from ds4jax import Engine

ROOT = Path(__file__).parent.parent
_KEEP_S = 7 * 24 * 3600

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Silent promotion hides wrong arithmetic (a float64 or bfloat16 that creeps in, a [B] that broadcasts as [T]).
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

# Compiling is most of what the tests cost. Three quarters of that are LLVM's optimiser and the generator of loops that goes through MLIR.
# Without them XLA decides all that it decides with them (what is fused, how products and sums are laid out: the optimised HLO is the
# same), and only the instructions of each loop differ. Programs that run for thousands of steps, and those whose bits and numbers are
# proved to be right, are compiled as users do (tests/compiler.py). The last flag cuts a program into two parts instead of up to 32, each
# of which has a cost of its own. Child processes inherit all this.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Newer XLAs may have one generator only, and they end at a flag that they do not know.
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=2")

# Compiled programs stay for the next run, in a folder that git ignores; their names are
# hashes of all that decides them, so nothing stale is found there. Child processes inherit the folder. JAX's own cache stays off:
# what it gives back on a CPU cannot be stored again.
_compiled = ROOT / ".pytest_cache" / "ds4jax"
os.environ.setdefault("DS4JAX_CACHE_DIR", str(_compiled))
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)


# A slow machine is no failure.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Return the folder of files that tests read."""
    return Path(__file__).parent / "fixtures"


# Files that compile for long. Workers take whole files: one of these begun last would leave the other worker with nothing to do.
_BEGUN_FIRST = (
    "test_exact.py",
    "test_fused.py",
    "test_notebooks.py",
    "test_bench.py",
    "test_public_api.py",
    "test_oracle.py",
    "test_shapes.py",
    "test_twin.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave the others as they are."""
    rank = {name: i for i, name in enumerate(_BEGUN_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_sessionstart() -> None:
    """Delete compiled programs that no run has used for a week."""
    oldest = time.time() - _KEEP_S
    for file in _compiled.rglob("*"):
        if file.is_file() and max(file.stat().st_atime, file.stat().st_mtime) < oldest:
            file.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def engines() -> Iterator[Callable[[str], Engine]]:
    """Give the engine over an oracle set (float32, kv_quant "none"); each is opened once in a run, for compiling is slow."""
    from tests.compiler import compiled_as_users_do
    from tests.model.oracle import open_engine

    opened: dict[str, Engine] = {}

    def engine_of(name: str) -> Engine:
        if name not in opened:
            _compiled.mkdir(parents=True, exist_ok=True)
            # The name of a stored program does not tell its optimiser: those of one engine are always compiled alike. Of two workers,
            # the second finds what the first compiles.
            with compiled_as_users_do(), (_compiled / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                opened[name] = open_engine(name)
        return opened[name]

    yield engine_of
    for engine in opened.values():
        engine.close()
