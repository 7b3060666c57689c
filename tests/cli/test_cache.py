"""`ds4jax cache` as a user starts it."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ds4jax.cli.cache import human_age
from ds4jax.cli.main import app
from ds4jax.serving.engine.kvstore import Reason
from tests.engine.kvstore import files, opened, save


def run(command: str, *arguments: str, folder: Path) -> Result:
    return CliRunner().invoke(app, ["cache", command, *arguments, "--kv-disk-dir", str(folder)], env={"COLUMNS": "80"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sessions, one saved a minute ago."""
    now_s = time.time()
    for tokens, age_s, options in (([1] * 600, 7200, {}), ([2] * 700, 60, {"text": "Grüße".encode(), "reason": Reason.SHUTDOWN})):
        store = opened(tmp_path, clock=lambda age_s=age_s: now_s - age_s)  # type: ignore[misc]
        assert save(store, tokens, 5000, **options)
        store.close()
    return tmp_path


def keys(folder: Path) -> list[str]:
    return [entry["key"] for entry in json.loads(run("ls", "--json", folder=folder).stdout)]


def test_ls(folder: Path) -> None:
    result = run("ls", folder=folder)
    assert result.exit_code == 0, result.output
    header, first, second, total = (line.split() for line in result.stdout.splitlines())
    assert [first[0], second[0]] == [key[:12] for key in keys(folder)]
    assert header[:3] == ["key", "tokens", "size"]
    assert first[1] == "700" and "shutdown" in first and "1 min ago" in " ".join(first) and first[-1] == "ok"
    assert second[1] == "600" and "cold" in second and "2 h ago" in " ".join(second)
    assert total[:2] == ["2", "sessions,"] and total[-1] == "KiB"


def test_ls_of_an_empty_folder_and_of_none(tmp_path: Path) -> None:
    assert run("ls", folder=tmp_path).stdout.splitlines()[-1] == "0 sessions, 0 B"
    assert json.loads(run("ls", "--json", folder=tmp_path).stdout) == []
    missing = run("ls", folder=tmp_path / "missing")
    assert missing.exit_code == 2 and "cannot be read (No such file or directory)" in missing.output


def test_show(folder: Path) -> None:
    key = keys(folder)[0]
    shown = run("show", key[:6], folder=folder)
    assert shown.exit_code == 0 and key in shown.output and "shutdown" in shown.output and "[5000]" in shown.output
    values = json.loads(run("show", key, "--json", folder=folder).stdout)
    assert (values["tokens"], values["hits"], values["text_bytes"]) == (700, 0, 7)
    assert values["arrays"] == [{"name": "x", "dtype": "uint8", "shape": [5000], "bytes": 5000}]
    assert run("show", key, "--text", folder=folder).stdout == "Grüße\n"


@pytest.mark.parametrize("key", ["x", ""])
def test_a_key_that_names_none_or_several(folder: Path, key: str) -> None:
    for command in ("show", "rm"):
        result = run(command, key, folder=folder)
        assert result.exit_code == 2 and "sessions have keys that begin so" in result.output
    assert len(files(folder)) == 2


def test_rm(folder: Path) -> None:
    (folder / "README").write_text("not a session")
    first, second = keys(folder)
    result = run("rm", first[:8], first, folder=folder)
    assert result.exit_code == 0 and result.output.count(f"deleted {first}") == 1
    assert keys(folder) == [second]
    assert run("rm", folder=folder).exit_code == run("rm", second, "--all", folder=folder).exit_code == 2
    assert run("rm", "--all", folder=folder).exit_code == 0
    assert [path.name for path in files(folder)] == ["README"]


def test_verify(folder: Path) -> None:
    good = run("verify", folder=folder)
    assert good.exit_code == 0 and good.stdout == "2 checked, 0 corrupt\n"
    path = next(path for path in files(folder) if path.stem == keys(folder)[0])
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    bad = run("verify", folder=folder)
    assert bad.exit_code == 1 and bad.stdout.splitlines() == [f"{path}: x has another digest", "2 checked, 1 corrupt"]
    problems = json.loads(run("verify", "--json", folder=folder).stdout)
    assert [problem["problem"] for problem in problems] == ["x has another digest", None]
    assert run("show", path.stem, "--text", folder=folder).exit_code == 1


def test_verify_tells_damaged_records_and_other_versions_apart(folder: Path) -> None:
    first, second = (next(path for path in files(folder) if path.stem == key) for key in keys(folder))
    for path, at in ((first, 33), (second, 8)):
        data = bytearray(path.read_bytes())
        data[at] ^= 4
        path.write_bytes(data)
    result = run("verify", folder=folder)
    assert result.exit_code == 1 and result.stdout.endswith("2 checked, 1 corrupt\n")
    assert "record of its use is damaged" in result.stdout and "version 5, known here is 1" in result.stdout
    assert "other version" in run("ls", folder=folder).stdout


@pytest.mark.parametrize(("age_s", "text"), [(-5, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (7200, "2 h ago"), (2e5, "2 d ago")])
def test_ages(age_s: float, text: str) -> None:
    assert human_age(age_s) == text
