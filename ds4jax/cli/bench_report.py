"""What a benchmark leaves behind: a table in the terminal, and rows of a CSV file that say where they come from."""

from __future__ import annotations

import csv
import datetime
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ds4jax import __version__
from ds4jax.errors import ConfigError

if TYPE_CHECKING:
    from ds4jax.cli.bench_model import Subject

Row = Mapping[str, Any]


def origin(device: str) -> dict[str, Any]:
    """Say when, of which commit and where something was measured. device: the name of what computed."""
    return {"date": datetime.date.today().isoformat(), "commit": commit(), "device": device, "jax": version("jax")}


def identity(subject: Subject) -> dict[str, Any]:
    """Say which model was measured, and in which arithmetic."""
    spec = subject.model.spec
    return {
        "model": spec.config.name,
        "quant": subject.quant,
        "kv_quant": spec.kv_quant,
        "dtype": spec.dtype,
        "layers": spec.config.n_layer,
    }


def command_line() -> dict[str, Any]:
    """Say what was typed."""
    return {"command": shlex.join(["ds4jax", *sys.argv[1:]])}


def commit() -> str:
    """Return the commit of this checkout, with a + where the package differs from it; outside a checkout the version."""
    folder = Path(__file__).resolve().parents[1]
    try:
        short = _git(folder, "rev-parse", "--short", "HEAD")
        return short + ("+" if _git(folder, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return __version__


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, interpolated; NaN of nothing."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def times(ms: Sequence[float]) -> dict[str, float]:
    """Sum up measured times."""
    return {"ms_median": percentile(ms, 50), "ms_p10": percentile(ms, 10), "ms_p90": percentile(ms, 90)}


def append_csv(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a file, which gets a header when it is new.

    Raises ConfigError where the file holds other columns or cannot be written.
    """
    if not rows:
        return
    columns = list(rows[0])
    try:
        new = not path.exists() or path.stat().st_size == 0
        if not new:
            with path.open(newline="", encoding="utf-8") as file:
                found = next(csv.reader(file))
            if found != columns:
                raise ConfigError(
                    f"--csv {path}: the file has the columns {','.join(found)}, these are {','.join(columns)}; name another file"
                )
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows({key: _rounded(value) for key, value in row.items()} for row in rows)
    except OSError as error:
        raise ConfigError(f"--csv {path}: cannot be written ({error.strerror or error}); name a file in an existing folder") from error


def print_table(title: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Show some columns of rows."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(str(_rounded(row[column])) for column in columns))
    Console(highlight=False).print(table)


def _rounded(value: Any) -> Any:
    """Keep four digits of a measured number: there is no more in it."""
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1000 else round(value) if isinstance(value, float) else value
