"""What the commands print: answers go to stdout, all else to stderr."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

if TYPE_CHECKING:
    from ds4jax.serving.engine.programs import Program

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def note(message: str) -> None:
    """Tell the user something, on stderr."""
    stderr.print(message, markup=False)


def warn(message: str) -> None:
    """Print one warning."""
    stderr.print(f"warning: {message}", style="yellow", markup=False)


def fail(message: str) -> None:
    """Print what stopped the command."""
    stderr.print(f"error: {message}", style="red", markup=False)


def log_to_stderr() -> None:
    """Show the server's log (requests, batches), one line each."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("ds4jax").setLevel(logging.INFO)


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on a terminal while bytes are read or written; yields progress(bytes done, bytes in all, name)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[item]}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(title, total=None, item="")
        yield lambda done, total, name: bar.update(task, completed=done, total=total, item=name)


@contextmanager
def program_progress() -> Iterator[Callable[[Program], None]]:
    """Name the program that was compiled last while compiling goes on, then sum up; yields a function to call after each.

    Programs that come after the sum (compiled beside the serving) get a line each.
    """
    done: list[Program] = []
    waiting = True

    with stderr.status("compiling") as status:

        def on_program(program: Program) -> None:
            done.append(program)
            if waiting:
                status.update(f"compiling: {program.name} took {program.seconds:.1f} s")
            else:
                note(f"program ready: {program.name}, compiled in {program.seconds:.1f} s")

        yield on_program
    waiting = False
    n_found = sum(program.from_disk for program in done)
    note(f"programs: {len(done) - n_found} compiled, {n_found} found on disk")


def human_bytes(n_bytes: int) -> str:
    """Write a size in the largest binary unit that gives at least 1."""
    size, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
