"""Choose the device before anything runs on it, and say so plainly when it is not there."""

from __future__ import annotations

import os
from typing import Literal

from ds4jax.errors import BackendMismatchError

Platform = Literal["cpu", "gpu", "tpu"]


def select_backend(backend: Literal["auto", "cpu", "cuda"], gpu: int | None = None) -> Platform:
    """Make JAX use the backend that was asked for, and return the platform it runs on.

    Call it before the first array is made: a process keeps the devices that it started with.

    Args:
        backend: "auto" takes the best there is.
        gpu: id of the one GPU to use, counted among those that CUDA_VISIBLE_DEVICES leaves.

    Raises BackendMismatchError if the backend or the GPU does not exist here; a server that quietly runs on the CPU helps nobody.
    """
    if gpu is not None:
        visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
        if visible and gpu >= len(visible):
            raise BackendMismatchError(f"GPU {gpu}", f"CUDA_VISIBLE_DEVICES={','.join(visible)}")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible else str(gpu)

    # Weights of a large model fill most of a GPU; JAX would claim three quarters of it. Read when JAX starts, so said before.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

    import jax  # not before CUDA_VISIBLE_DEVICES is set

    if backend == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        platform = jax.default_backend()
    except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not installed
        raise BackendMismatchError(os.environ.get("JAX_PLATFORMS", backend), f"none of that kind ({error})") from error
    if backend != "auto" and platform != {"cpu": "cpu", "cuda": "gpu"}[backend]:
        wanted = backend if gpu is None else f"{backend} (GPU {gpu})"
        raise BackendMismatchError(wanted, ", ".join(sorted({device.platform for device in jax.devices()})) + " only")
    match platform:
        case "cpu" | "gpu" | "tpu":
            return platform
        case "cuda":
            return "gpu"
        case _:
            raise BackendMismatchError(backend, f"{platform}, which ds4jax does not know")
