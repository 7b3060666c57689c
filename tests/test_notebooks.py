"""The notebooks run from top to bottom, import only what they say, and are kept without outputs."""

from __future__ import annotations

import ast
import shutil
import warnings
from pathlib import Path

import pytest

from ds4jax.cli import default_model
from ds4jax.serving.engine.local import program_directory
from tests.small_model import write_two_layers

with warnings.catch_warnings():  # the notebook libraries warn about each other
    warnings.simplefilter("ignore")
    import nbclient
    import nbformat

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
MAY_IMPORT = {"ds4jax", "numpy", "threading", "matplotlib"}


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two layers in the place of the default model: its programs compile faster, and the engine tests use them too."""
    programs = program_directory()
    programs.mkdir(mode=0o700, parents=True, exist_ok=True)
    monkeypatch.setenv("DS4JAX_CACHE_DIR", str(tmp_path))
    (tmp_path / "programs").symlink_to(programs)
    shutil.move(write_two_layers(tmp_path / "small.gguf"), default_model())
    nbclient.NotebookClient(nbformat.read(path, as_version=4), timeout=240, kernel_name="python3").execute()
