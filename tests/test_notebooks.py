"""The notebooks run from top to bottom, import only what they say, and are kept without outputs."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():  # the notebook libraries warn about each other
    warnings.simplefilter("ignore")
    import nbclient
    import nbformat

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MAY_IMPORT = {"ds4jax", "numpy", "random", "threading", "matplotlib"}


def code(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stripped_and_imports_are_few(path: Path) -> None:
    for cell in code(path):
        assert not cell.outputs and cell.execution_count is None
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert {name.partition(".")[0] for name in names} <= MAY_IMPORT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path) -> None:
    """All open the same engine: its programs are compiled once."""
    nbclient.NotebookClient(nbformat.read(path, as_version=4), timeout=240, kernel_name="python3").execute()
