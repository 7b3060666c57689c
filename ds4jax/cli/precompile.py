"""`ds4jax precompile`: fill the cache of compiled programs before the first start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ds4jax.cli.generate import BackendOption, ModelOption
from ds4jax.config import EngineConfig


def precompile(
    model: ModelOption = None,
    batched_session: Annotated[int, typer.Option(min=1, help="As for serve.")] = EngineConfig.slots,
    ctx: Annotated[int, typer.Option("-c", "--ctx", min=2, help="As for serve.")] = EngineConfig.ctx,
    backend: BackendOption = "auto",
    kv_quant: Annotated[str, typer.Option(help="As for serve.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for serve.")] = "auto",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder of programs. Default: JAX_COMPILATION_CACHE_DIR.")] = None,
) -> None:
    """Compile every program that `serve` with the same options needs, and keep them on disk for its start."""
    from ds4jax.cli import console
    from ds4jax.cli.loading import Numerics, open_engine
    from ds4jax.cli.options import choose_backend, choose_model, engine_config

    if output is not None:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(output.absolute())
    path = choose_model(str(model) if model else None, None, ()).path
    settings = engine_config(os.environ, console.warn, slots=batched_session, ctx=ctx, queue_limit=None, prefill_chunk=None)
    with open_engine(path, settings, *choose_backend(backend, False, False, None), Numerics(kv_quant, dtype)):
        pass  # an engine that is open has compiled and run all its programs
    console.note(f"programs are in {os.environ['JAX_COMPILATION_CACHE_DIR']}")
