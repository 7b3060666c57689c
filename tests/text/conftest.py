"""Vocabularies that the tests of the text room share."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds4jax.text import Tokenizer


@pytest.fixture(scope="session")
def tiny_vocabulary(fixtures: Path) -> dict[str, Any]:
    """Return GGUF metadata of a 512-token vocabulary, and texts with the ids ds4 gives them."""
    loaded: dict[str, Any] = json.loads((fixtures / "tokenizer" / "vocab-512.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="session")
def tiny(tiny_vocabulary: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(tiny_vocabulary["metadata"])
