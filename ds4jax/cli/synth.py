"""`ds4jax synth`: a model with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def synth(
    output: Annotated[Path, typer.Argument(help="GGUF file to write.")],
    preset: Annotated[str, typer.Option(help="tiny (megabytes), flash or pro (the published shapes).")] = "tiny",
    quant: Annotated[str, typer.Option(help="Routed experts in q2, q4 or q8.")] = "q8",
    layers: Annotated[int | None, typer.Option(help="Only the first so many layers.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed writes the same file.")] = 0,
    vocab: Annotated[Path | None, typer.Option(help="tokenizer.json to take the vocabulary from.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a model with random weights in ds4's file layout, for trying things out and measuring speed."""
    from ds4jax.cli.console import byte_progress, human_bytes, note
    from ds4jax.cli.presets import shape_of, vocabulary_of
    from ds4jax.errors import ConfigError, ModelFileError
    from ds4jax.model.gguf.writer import write_synthetic

    if output.exists() and not force:
        raise ConfigError(f"{output}: the file exists; choose another name, or replace it with --force")
    config = shape_of(preset, layers)
    try:
        with byte_progress(f"writing {output.name}") as progress:
            write_synthetic(output, config, quant, seed, vocabulary_of(config, vocab), progress)
    except OSError as error:
        raise ModelFileError(f"{output}: cannot be written ({error.strerror or error}); is there room, and may you write there?") from error
    note(f"{output}: {config.name}, {config.n_layer} layers, {quant}, {human_bytes(output.stat().st_size)}")
