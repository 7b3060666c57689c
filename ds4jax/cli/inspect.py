"""`ds4jax inspect`: what a GGUF file holds."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds4jax.cli.console import human_bytes
from ds4jax.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from ds4jax.config import ModelConfig
    from ds4jax.model.gguf.reader import GGUFFile


def inspect(
    model: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="GGUF file. Default: the small model of the package.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    batched_session: Annotated[int | None, typer.Option(min=1, help="Plan the memory of so many slots.")] = None,
    ctx: Annotated[int | None, typer.Option("-c", "--ctx", min=2, help="Plan the memory of slots of so many tokens.")] = None,
) -> None:
    """Show the shape of a model, how its weights are stored, and what memory it would need to be served."""
    from rich.console import Console

    from ds4jax.cli.loading import choose_path
    from ds4jax.model.gguf.reader import GGUFFile

    file = choose_path(model)
    opened = GGUFFile(file)
    console = Console(highlight=False)
    console.print(shape_table(opened.config))
    console.print(weights_table(opened))
    if batched_session is not None or ctx is not None:
        print(plan(file, EngineConfig(slots=batched_session or EngineConfig.slots, ctx=ctx or EngineConfig.ctx)))
    if tensors:
        for tensor in opened.tensors.values():
            print(f"{tensor.name:44} {tensor.kind:8} {list(tensor.shape)!s:24} {human_bytes(tensor.nbytes)}")


def plan(file: Path, config: EngineConfig) -> str:
    """Say what memory an engine would need here, and whether it is there; nothing is allocated."""
    from ds4jax.cli.loading import Numerics, describe_plan, read_spec
    from ds4jax.serving.engine.local import engine_shapes
    from ds4jax.serving.engine.memory import plan_memory

    spec = read_spec(file, Numerics())
    shapes = engine_shapes(spec, config)
    planned = plan_memory(spec, config.slots, config.ctx, shapes.prefill_shapes, n_snapshot=shapes.n_snapshot)
    return describe_plan(planned) + (": fits" if planned.fits else f": does not fit; {planned.most_slots} slots would")


def shape_table(config: ModelConfig) -> Table:
    """Lay out the shape of a model."""
    from rich.table import Table

    ratios = config.compress_ratios
    table = Table(title=config.name, show_header=False, title_justify="left")
    for name, value in (
        ("layers", f"{config.n_layer}: {ratios.count(0)} window only, {ratios.count(4)} ratio 4, {ratios.count(128)} ratio 128"),
        ("hidden size", f"{config.n_embd} x {config.n_hc} streams"),
        ("attention", f"{config.n_head} heads of {config.head_dim} ({config.n_rot} rotary), window {config.n_window}"),
        ("indexer", f"{config.n_index_head} heads of {config.index_dim}, best {config.index_top_k} rows"),
        ("experts", f"{config.n_expert_used} of {config.n_expert}, width {config.n_ff}; by token id in {config.n_hash_layer} layers"),
        ("vocabulary", f"{config.n_vocab} tokens"),
        ("trained context", f"{config.n_ctx_train} tokens"),
    ):
        table.add_row(name, value)
    return table


def weights_table(file: GGUFFile) -> Table:
    """Lay out how many tensors, values and bytes there are of each type."""
    from math import prod

    from rich.table import Table

    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in file.tensors.values():
        for kind in (tensor.kind, "all"):
            for i, n in enumerate((1, prod(tensor.shape), tensor.nbytes)):
                totals[kind][i] += n
    table = Table("type", "tensors", "values", "size", title="weights", title_justify="left")
    for kind, (n_tensors, n_values, n_bytes) in sorted(totals.items(), key=lambda item: item[1][2]):
        table.add_row(kind, str(n_tensors), f"{n_values:,}", human_bytes(n_bytes))
    return table
