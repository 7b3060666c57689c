"""ds4jax: serve DeepSeek V4 Flash from ds4's GGUF files to many sessions at once, in JAX.

model = ds4jax.load_model(ds4jax.small_model())  # or the path of a file
with ds4jax.Engine(model, slots=4, ctx=4096) as engine:
    for piece in engine.generate("Once upon a time", max_tokens=32):
        print(piece, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds4jax.packaged import small_model

__version__ = "0.1.0"
__all__ = ["Engine", "Model", "load_model", "small_model"]

if TYPE_CHECKING:
    from ds4jax.model.model import Model, load_model
    from ds4jax.serving.engine.local import Engine


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import ds4jax` alone (the HTTP edge, `--help`) loads no jax."""
    if name in ("Model", "load_model"):
        from ds4jax.model import model

        return getattr(model, name)
    if name == "Engine":
        from ds4jax.serving.engine.local import Engine

        return Engine
    raise AttributeError(f"module 'ds4jax' has no attribute {name!r}")
