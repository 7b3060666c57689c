"""`ds4jax eval`: what a model can do, measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ds4jax.cli.generate import BackendOption


def evaluate(
    model: Annotated[Path | None, typer.Argument(help="GGUF file. Default: the small model of the package.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few questions of each kind instead of some hundred.")] = False,
    at_once: Annotated[int, typer.Option(min=1, help="Questions answered at a time.")] = 8,
    report: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
    backend: BackendOption = "auto",
) -> None:
    """Measure perplexity, stories, tool calls, recall, thinking, and that a reply does not depend on what is asked beside it.

    The bars are those that the small model (docs/small-model.md) is to meet; any other model may be held to them too.
    """
    from ds4jax.cli.console import note
    from ds4jax.cli.loading import open_engine
    from ds4jax.cli.options import choose_backend, choose_model
    from ds4jax.config import EngineConfig
    from ds4jax.evals.measures import Subject
    from ds4jax.evals.report import FULL, QUICK
    from ds4jax.evals.report import evaluate as measure

    path = choose_model(str(model) if model else None, None, ()).path
    rows = []
    with open_engine(path, EngineConfig(slots=at_once, ctx=4096), *choose_backend(backend, False, False, None)) as (engine, _):
        for row in measure(Subject(engine, at_once), QUICK if quick else FULL):
            rows.append(row)
            result = f"{row.value:.2f}" if row.of is None else f"{row.value:.0f} of {row.of}"
            verdict = {None: "", True: "reached", False: "missed"}[row.passed]
            bar = "" if row.bar is None else f"bar {row.bar:.0%}: {verdict}"
            print(f"{row.name:<42} {result:>12}  {bar}", flush=True)
    if report is not None:
        report.write_text(json.dumps([asdict(row) | {"passed": row.passed} for row in rows], indent=1) + "\n", encoding="utf-8")
        note(f"written: {report}")
