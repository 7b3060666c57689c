"""Recorded requests as fixtures: the form that a client gives them, without whose they were and without its prose.

Kept: paths, the headers that a server may heed, every field, the names and schemas of tools, what our script said and what became of
it. Replaced: ids, by numbers that still match each other; what clients tell the model, by a word about it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.clients.record import Exchange
from tools.clients.scripted import ANSWER, COMMAND, PREAMBLE, PURPOSE, QUESTIONS, SECRET, THOUGHTS

HEADERS = ("accept", "accept-encoding", "anthropic-beta", "anthropic-version", "authorization", "content-type")
OURS = (*QUESTIONS, SECRET, ANSWER, COMMAND, PURPOSE, PREAMBLE, THOUGHTS)
"""A short text with one of these in it is of our making."""

SHORT = 200
"""Characters that a text of ours has at most."""

_PROSE = {"text", "content", "description", "instructions", "output", "title"}
_OPAQUE = {"client_metadata", "metadata"}  # members of a body; a tool may have a parameter of such a name
_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=_)[0-9a-f]{24,32}\b|ses_\w+|(?<=Chunk ID: )\w+")
_TAG = re.compile(r"\s*<([\w-]+)[ >]")
_BILLING = re.compile(r"(x-anthropic-billing-header:).*", re.DOTALL)


def write_fixture(path: Path, exchanges: Sequence[Exchange]) -> None:
    """Write what a client sent: a JSON list with method, path, headers and body of each request."""
    kept = [
        {
            "method": exchange.method,
            "path": exchange.path,
            "headers": {name: exchange.headers[name] for name in HEADERS if name in exchange.headers},
            "body": scrub_body(json.loads(exchange.body)) if exchange.body else None,
        }
        for exchange in exchanges
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_number_ids(json.dumps(kept, indent=1, ensure_ascii=False)) + "\n", encoding="utf-8")


def scrub_body(body: dict[str, Any]) -> dict[str, Any]:
    """Replace prose, and what identifies people or machines, in the body of a request."""
    return {name: _opaque(member) if name in _OPAQUE else _scrub(member, name) for name, member in body.items()}


def _scrub(value: Any, key: str) -> Any:
    """Replace prose in a value, recursively. key: the member that holds it."""
    if isinstance(value, dict):
        return {name: _scrub(member, name) for name, member in value.items()}
    if isinstance(value, list):
        return [_scrub(item, key) for item in value]
    if isinstance(value, str) and key in _PROSE and not (len(value) <= SHORT and any(ours in value for ours in OURS)):
        return _placeholder(value, key)
    return value


def _opaque(value: Any) -> Any:
    # Codex shuffles such members.
    return {name: _opaque(value[name]) for name in sorted(value)} if isinstance(value, dict) else "opaque"


def _placeholder(text: str, key: str) -> str:
    """Say that there was a text, keeping the marks at its beginning by which a server may know it."""
    if billing := _BILLING.match(text):
        return f"{billing[1]} opaque"
    if tag := _TAG.match(text):
        return f"<{tag[1]}>\nof the client\n</{tag[1]}>"
    return "described" if key == "description" else "Told by the client."


def _number_ids(text: str) -> str:
    """Replace ids by numbers, the same id by the same number."""
    numbers: dict[str, str] = {}
    return _ID.sub(lambda match: numbers.setdefault(match[0], f"{len(numbers) + 1:04}"), text)
