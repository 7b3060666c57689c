"""`ds4jax cache`: look at the sessions that servers keep on disk, delete some, check all."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds4jax.cli.console import fail, human_bytes, note
from ds4jax.errors import ConfigError

if TYPE_CHECKING:
    from ds4jax.serving.engine.kvstore import StoredEntry

app = typer.Typer(no_args_is_help=True, help="Look after the sessions on disk. Servers may run meanwhile.")

FolderOption = Annotated[Path, typer.Option("--kv-disk-dir", help="The folder, as given to serve.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KeyArgument = Annotated[str, typer.Argument(help="The key, or the beginning of it.")]

SHORT_KEY = 12  # digits of a key in a list


@app.command()
def ls(folder: FolderOption, as_json: JsonOption = False) -> None:
    """List the sessions, those used last first. `show` tells more of one."""
    entries = _scan(folder)
    if as_json:
        print(json.dumps([summary(entry) for entry in entries], indent=2))
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(Column("key", min_width=SHORT_KEY), "tokens", "size", "saved as", "hits", "used", "state", box=None)
    now_s = time.time()
    for entry in entries:
        header, usage = entry.header, entry.usage
        row = ("", "", "", "")
        if header is not None:
            used = "?" if usage.last_used_s is None else human_age(now_s - usage.last_used_s)
            row = (str(header.n_tokens), str(header.reason), str(usage.hits), used)
        table.add_row(entry.key[:SHORT_KEY], row[0], human_bytes(entry.size_bytes), *row[1:], str(entry.state))
    Console(highlight=False).print(table)
    n = len(entries)
    print(f"{n} session{'s' * (n != 1)}, {human_bytes(sum(entry.size_bytes for entry in entries))}")


@app.command()
def show(
    key: KeyArgument,
    folder: FolderOption,
    text: Annotated[bool, typer.Option("--text", help="Print its text, and nothing else.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show one session: what it was made by, its arrays, its text."""
    entry = _find(_scan(folder), key)
    if text:
        print(_text(entry))
        return
    values = summary(entry)
    if as_json:
        print(json.dumps(values, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    arrays = values.pop("arrays", [])
    about = Table(show_header=False, box=None)
    for name, value in values.items():
        about.add_row(name, human_bytes(value) if name == "size_bytes" else _when(value) if name.endswith("_s") else str(value))
    console.print(about)
    if arrays:
        table = Table("array", "type", "shape", "size", box=None)
        for array in arrays:
            table.add_row(array["name"], array["dtype"], str(array["shape"]), human_bytes(array["bytes"]))
        console.print(table)


@app.command()
def rm(
    folder: FolderOption,
    keys: Annotated[list[str] | None, typer.Argument(help="Keys, or beginnings of them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all sessions; files of others stay.")] = False,
) -> None:
    """Delete sessions."""
    if everything == bool(keys):
        raise ConfigError("ds4jax cache rm: name the sessions to delete by their keys (ds4jax cache ls lists them), or give --all")
    entries = _scan(folder)
    for entry in entries if everything else {found.key: found for found in (_find(entries, key) for key in keys or ())}.values():
        try:
            entry.path.unlink(missing_ok=True)
        except OSError as error:
            fail(f"{entry.path}: cannot be deleted ({error.strerror})")
            raise typer.Exit(1) from error
        note(f"deleted {entry.key}, {human_bytes(entry.size_bytes)}")


@app.command()
def verify(folder: FolderOption, as_json: JsonOption = False) -> None:
    """Read every session and check every byte. Exit status 1 if one is corrupt; a server deletes such a file when it meets it."""
    from ds4jax.serving.engine.kvstore.folder import State

    checked = [(entry, _problem(entry)) for entry in _scan(folder)]
    corrupt = [(entry, problem) for entry, problem in checked if problem is not None and entry.state is not State.OTHER_VERSION]
    if as_json:
        print(json.dumps([{"key": entry.key, "path": str(entry.path), "problem": problem} for entry, problem in checked], indent=2))
    else:
        for entry, problem in checked:
            if problem:
                print(f"{entry.path}: {problem}")
        print(f"{len(checked)} checked, {len(corrupt)} corrupt")
    if corrupt:
        raise typer.Exit(1)


def summary(entry: StoredEntry) -> dict[str, Any]:
    """Return what a file says of itself, ready for JSON. Times are in s since 1970."""
    values: dict[str, Any] = {"key": entry.key, "path": str(entry.path), "size_bytes": entry.size_bytes, "state": str(entry.state)}
    header = entry.header
    if header is None:
        return values | {"problem": entry.problem}
    return values | {
        "model": header.model, "layout": header.layout, "reason": str(header.reason), "tokens": header.n_tokens, "ctx": header.n_ctx,
        "text_bytes": header.n_text, "replay_bytes": header.n_replay, "hits": entry.usage.hits, "created_s": header.created_s,
        "last_used_s": entry.usage.last_used_s,
        "arrays": [{"name": part.name, "dtype": part.dtype, "shape": list(part.shape), "bytes": part.nbytes} for part in header.parts],
    }  # fmt: skip


def human_age(age_s: float) -> str:
    """Write how long ago something was, in the largest unit that gives at least 1."""
    age = max(age_s, 0.0)  # the clock of another host may be ahead
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= length_s:
            return f"{age / length_s:.0f} {unit} ago"
    return f"{age:.0f} s ago"


def _when(time_s: float | None) -> str:
    if time_s is None:
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s)) + f" ({human_age(time.time() - time_s)})"


def _scan(folder: Path) -> list[StoredEntry]:
    """List the sessions of a folder, those used last first. Raises ConfigError if it cannot be read."""
    from ds4jax.serving.engine.kvstore.folder import Index

    try:
        entries = Index(folder).scan()
    except OSError as error:
        raise ConfigError(f"--kv-disk-dir {folder}: cannot be read ({error.strerror}); name the folder that serve was given") from None
    return sorted(entries, key=lambda entry: (-(entry.usage.last_used_s or 0.0), entry.key))


def _find(entries: Sequence[StoredEntry], key: str) -> StoredEntry:
    found = [entry for entry in entries if entry.key.startswith(key)]
    if len(found) != 1:
        raise ConfigError(f"{key}: {len(found) or 'no'} sessions have keys that begin so; ds4jax cache ls lists them")
    return found[0]


def _text(entry: StoredEntry) -> str:
    from ds4jax.serving.engine.kvstore.files import read_entry
    from ds4jax.serving.engine.kvstore.format import CorruptEntryError, OtherVersionError
    from ds4jax.serving.engine.kvstore.texts import SPECIAL

    try:
        return read_entry(entry.path).text.replace(SPECIAL, b"").decode("utf-8", "replace")
    except (CorruptEntryError, OtherVersionError, OSError) as error:
        fail(f"{entry.path}: {error}")
        raise typer.Exit(1) from error


def _problem(entry: StoredEntry) -> str | None:
    """Read a whole file; return what is wrong with it. One that a server deletes meanwhile is in order."""
    from ds4jax.serving.engine.kvstore.files import GONE, read_entry
    from ds4jax.serving.engine.kvstore.format import CorruptEntryError, OtherVersionError

    try:
        read_entry(entry.path)
    except (CorruptEntryError, OtherVersionError) as error:
        return str(error)
    except OSError as error:
        return None if error.errno in GONE else str(error)
    return None if entry.usage.last_used_s is not None else "the record of its use is damaged; the session itself is whole"
