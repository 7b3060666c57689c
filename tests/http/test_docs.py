"""The pages about clients: what can be run is run, what can be parsed is parsed."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.http.conftest import MakeServer

CLIENTS = Path(__file__).parents[2] / "docs" / "clients"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(language, text, id=f"{page.stem}-{i}")
    for page in sorted(CLIENTS.glob("*.md"))
    for i, (language, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]
ADDRESS = "http://127.0.0.1:8080"


@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_examples(make_server: MakeServer, capsys: pytest.CaptureFixture[str], language: str, text: str) -> None:
    match language:
        case "json":
            json.loads(text)
        case "toml":
            tomllib.loads(text)
        case "python":
            assert ADDRESS in text
            exec(compile(text.replace(ADDRESS, make_server().url), "example", "exec"), {})
            assert capsys.readouterr().out.strip()
        case _:
            assert language == "sh"


def test_every_page_is_in_the_table() -> None:
    table = (CLIENTS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", table)) == {page.name for page in CLIENTS.glob("*.md")} - {"README.md"}
