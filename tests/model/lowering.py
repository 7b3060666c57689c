"""Lower a kernel for CUDA where there is none: Pallas builds its Triton program without a GPU, so unsupported operations show on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import pytest

from ds4jax.model.kernels import launch


def lower_for_cuda(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *shapes: Any) -> str:
    """Return the lowered text of function(*arguments of these shapes) for a GPU. Skips the test where jax needs a real one for that."""
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    with warnings.catch_warnings():  # the newest jax says of its Triton backend what docs/kernels.md does
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        try:
            return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        except RuntimeError as error:
            if "No supported GPU devices" not in str(error):
                raise
            pytest.skip("this jax lowers kernels only for a GPU that it knows")  # 0.11 and later; the oldest that is supported does without
