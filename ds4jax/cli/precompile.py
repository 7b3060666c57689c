"""`ds4jax precompile`: compile a server's programs before its first start."""

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
    snapshots: Annotated[int | None, typer.Option(min=0, help="As for serve.")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(min=1, help="As for serve.")] = None,
    kv_disk_dir: Annotated[Path | None, typer.Option(help="As for serve; nothing is read or written there.")] = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Programs compiled at a time. Default: 4, or the cores.")] = None,
    backend: BackendOption = "auto",
    kv_quant: Annotated[str, typer.Option(help="As for serve.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for serve.")] = "auto",
) -> None:
    """Compile every program that `serve` with the same options needs, so that it starts without compiling. Loads no weights.

    Programs go below DS4JAX_CACHE_DIR, by default the user's cache folder, where serve looks for them.
    """
    from ds4jax.cli import console
    from ds4jax.cli.loading import Numerics, choose_path, read_spec
    from ds4jax.cli.options import choose_backend, choose_model, engine_config
    from ds4jax.serving.engine.backend import select_backend

    path = choose_path(choose_model(str(model) if model else None, None, ()).path)
    settings = engine_config(
        os.environ, console.warn, slots=batched_session, ctx=ctx, queue_limit=None, snapshots=snapshots, prefill_chunk=prefill_chunk
    )
    select_backend(*choose_backend(backend, False, False, None))

    from ds4jax.serving.engine.local import engine_shapes, program_directory
    from ds4jax.serving.engine.programs import ProgramStore, compile_all

    directory = program_directory()
    shapes = engine_shapes(read_spec(path, Numerics(kv_quant, dtype)), settings, on_disk=kv_disk_dir is not None)
    with console.program_progress() as on_program:
        for program in compile_all(shapes, ProgramStore(directory), n_jobs=jobs):
            on_program(program)
            console.note(f"{program.name:16} {program.seconds:8.2f} s  {console.human_bytes(program.size_bytes)}")
    print(directory)
