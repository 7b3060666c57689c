"""The rooms of the house: who may import whom, and what stays out of each file. Read from the source, nothing is run."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ds4jax"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500

# room -> rooms it may import beside itself; every room may import the plain ones.
PLAIN_ROOMS = {"config", "errors", "text"}
MAY_IMPORT = {
    "": {"model", "serving.engine"},  # ds4jax itself: the public names, imported on demand
    "cli": {"", "serving.http", "serving.engine", "serving.engine.api", "model", "model.gguf", "evals"},
    "evals": {"model", "serving.engine", "serving.engine.api"},  # asks an engine as a program does that uses the package
    "serving.http": {"serving.engine.api", "serving.metrics"},
    "serving.metrics": {"serving.engine.api"},
    "serving.engine": {"model", "model.gguf", "serving.engine.api", "serving.metrics"},
    "serving.engine.api": set(),
    "serving": set(),
    "model": {"model.gguf"},
    "model.gguf": {"model"},
    "text": set(),
    "config": set(),
    "errors": set(),
}
# outside package -> files (or rooms) that may import it
GUARDED = {
    "jax": ("model/", "serving/engine/"),
    "jaxlib": ("model/", "serving/engine/"),
    "flax": ("model/", "serving/engine/"),
    "quart": ("serving/http/",),
    "hypercorn": ("serving/http/",),
    "asyncio": ("serving/http/", "cli/serve.py"),
    "gguf": ("model/gguf/",),
    "threading": ("serving/engine/loop.py", "serving/http/service.py", "serving/http/waiting.py"),
}
BLOCK_FORMATS = ("Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "MXFP4")
MAY_NAME_BLOCK_FORMATS = ("model/quant/", "model/gguf/", "cli/presets.py")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: Path) -> str:
    """Name of a file's module below ds4jax; "" for ds4jax itself."""
    return relative(path).removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".")


def room_of(module: str) -> str:
    """The longest room name that the module's name starts with."""
    return max((room for room in MAY_IMPORT if module == room or module.startswith(f"{room}.") or room == ""), key=len)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import in a file, those inside functions included; names of packages count as modules too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import; write it in full"
            module = node.module or ""
            for alias in node.names:
                is_module = module.split(".")[0] == "ds4jax" and exists(f"{module}.{alias.name}")
                yield node.lineno, f"{module}.{alias.name}" if is_module else module


def exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def test_arrows() -> None:
    wrong = []
    for path in SOURCES:
        room = room_of(module_name(path))
        for line, module in imports(path):
            if module.split(".")[0] != "ds4jax":
                continue
            target = room_of(module.removeprefix("ds4jax").strip("."))
            if target not in {room} | PLAIN_ROOMS | MAY_IMPORT[room]:
                wrong.append(f"{relative(path)}:{line}: {room or 'ds4jax'} may not import {module}")
    assert not wrong, "\n".join(wrong)


def test_guarded_packages() -> None:
    wrong = [
        f"{relative(path)}:{line}: {module} belongs in {' and '.join(GUARDED[module.split('.')[0]])}"
        for path in SOURCES
        for line, module in imports(path)
        if not relative(path).startswith(GUARDED.get(module.split(".")[0], ("",)))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_page_was_left_half_merged() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 5
    marks = ("<" * 7 + " ", "=" * 7 + "\n", ">" * 7 + " ")
    assert [page.name for page in pages for line in page.read_text("utf-8").splitlines(True) if line.startswith(marks)] == []


def test_block_formats_have_one_home() -> None:
    wrong = []
    for path in SOURCES:
        if relative(path).startswith(MAY_NAME_BLOCK_FORMATS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = node.value if isinstance(node, ast.Constant) else getattr(node, "id", getattr(node, "attr", None))
            if isinstance(named, str) and named in BLOCK_FORMATS:
                wrong.append(f"{relative(path)}:{node.lineno}: {named} is for model/quant and model/gguf to know")  # type: ignore[attr-defined]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["ds4jax.serving.http.app", "ds4jax.cli.main"])
def test_the_edge_and_the_command_load_no_jax(module: str) -> None:
    code = f"import sys, {module}; print(sorted(name for name in ('jax', 'jaxlib', 'flax') if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
