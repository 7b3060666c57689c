"""How hard the compiler tries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax.stages import Lowered

# What tests/conftest.py turns off, turned on for one program: options of `compile`.
AS_USERS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
    AS_USERS["xla_cpu_use_fusion_emitters"] = True

_compile = Lowered.compile


def _compile_as_users_do(lowered: Lowered, compiler_options: dict[str, Any] | None = None, **others: Any) -> Any:
    return _compile(lowered, compiler_options=AS_USERS | (compiler_options or {}), **others)


def run_as_users_do(function: Callable[..., Any], *args: Any) -> Any:
    """Compile a function of arrays as users do, and call it. Plain `jax.jit` takes the options of the tests."""
    with compiled_as_users_do():
        return jax.jit(function).lower(*args).compile()(*args)


@contextmanager
def compiled_as_users_do() -> Iterator[None]:
    """Compile as users do what is compiled ahead of time, in all threads.

    The setting of JAX is part of the names of stored programs, and so parts those of one kind from those of the other.
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lowered, "compile", _compile_as_users_do)
        jax.config.update("jax_disable_most_optimizations", False)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)
