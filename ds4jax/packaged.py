"""Files that come with the package."""

from __future__ import annotations

from pathlib import Path


def small_model() -> Path:
    """Return the path of the small model, which commands and notebooks use when none is named.

    It was trained to show what the server can do: docs/small-model.md. What it says of the world is often wrong.
    """
    return Path(__file__).parent / "data" / "small.gguf"
