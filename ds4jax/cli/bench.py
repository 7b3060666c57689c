"""`ds4jax bench`: measure decoding, prefill, loading, the price of an unused context, and a whole server."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds4jax.cli.bench_report import append_csv, command_line, identity, origin, print_table, times
from ds4jax.cli.bench_serve import serve
from ds4jax.cli.console import note
from ds4jax.cli.generate import BackendOption, ModelOption
from ds4jax.errors import ConfigError

if TYPE_CHECKING:
    from ds4jax.cli.bench_model import Subject
    from ds4jax.serving.engine.bench import DecodeTimes, MeasuredRunner
    from ds4jax.serving.engine.programs import Shapes

app = typer.Typer(no_args_is_help=True, help="Measure speed. Every command prints a table, and appends to a CSV file with --csv.")
app.command()(serve)

RandomOption = Annotated[
    str | None, typer.Option("--random", help="Random weights instead of a file: tiny, flash-q2, flash-q4, pro-q2, ...")
]
LayersOption = Annotated[int | None, typer.Option("--layers", help="Only the first so many layers of --random.")]
StepsOption = Annotated[int, typer.Option("--steps", min=10, help="Steps to measure, after warm-up; their median counts.")]
LiveOption = Annotated[int | None, typer.Option("--live", min=1, help="Tokens in each slot. Default: 32, or 2048 for context.")]
KvQuantOption = Annotated[str, typer.Option("--kv-quant", help="As for serve.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="As for serve.")]
CsvOption = Annotated[Path | None, typer.Option("--csv", help="Append the results to this file.")]

PRETEND_FROM = 1024  # tokens of random weights' context that are not worth feeding


@app.command()
def decode(
    model: ModelOption = None,
    random: RandomOption = None,
    layers: LayersOption = None,
    batched_session: Annotated[int, typer.Option(min=1, help="Slots; also the largest bucket.")] = 16,
    ctx: Annotated[int, typer.Option("-c", "--ctx", min=2, help="Tokens a slot holds.")] = 4096,
    live: LiveOption = None,
    steps: StepsOption = 100,
    buckets: Annotated[str | None, typer.Option(help="Row counts to measure, such as 1,4,16. Default: all.")] = None,
    backend: BackendOption = "auto",
    kv_quant: KvQuantOption = "auto",
    dtype: DtypeOption = "auto",
    csv: CsvOption = None,
) -> None:
    """Measure decode steps by bucket: every row live, the engine running one step ahead.

    ms: from one step's tokens to the next's. host_ms: the part of it in which the engine's thread did not wait for tokens
    (planning, packing, dispatch, delivery). From 1024 tokens on, the context of random weights is not fed: positions are set.
    """
    from ds4jax.cli.options import choose_backend
    from ds4jax.serving.engine.backend import select_backend

    sizes = parse_counts("--buckets", buckets) if buckets else None
    select_backend(*choose_backend(backend, False, False, None))

    from ds4jax.serving.engine.bench import DecodeBench, bench_shapes
    from ds4jax.serving.engine.buckets import row_buckets

    live = live or 32
    subject = _open(model, random, layers, kv_quant, dtype)
    pretend = subject.random and live >= PRETEND_FROM
    sizes = sizes or row_buckets(batched_session)
    if max(sizes) > batched_session:
        raise ConfigError(f"--buckets {buckets}: more rows than --batched-session {batched_session}; raise it, or leave the bucket out")
    runner = _runner(subject, bench_shapes(subject.model.spec, sizes, batched_session, ctx, live, steps, pretend=pretend))
    rows = [_decode_row(subject, DecodeBench(runner, bucket, live, pretend=pretend).measure(steps)) for bucket in sizes]
    how = "positions set" if pretend else "fed"
    print_table(
        _title(subject, f"decode, {live} tokens live ({how})"),
        rows,
        ("bucket", "ms_median", "ms_p10", "ms_p90", "tokens_per_s", "occupancy", "host_ms"),
    )
    _append(csv, [{key: value for key, value in row.items() if key != "occupancy"} for row in rows])


@app.command()
def prefill(
    model: ModelOption = None,
    random: RandomOption = None,
    layers: LayersOption = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt, fed alone to an empty slot.")] = 2048,
    chunks: Annotated[str, typer.Option(help="Chunk lengths to feed it in.")] = "128,512,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Times to feed it; the median counts.")] = 5,
    backend: BackendOption = "auto",
    kv_quant: KvQuantOption = "auto",
    dtype: DtypeOption = "auto",
    csv: CsvOption = None,
) -> None:
    """Measure prefill by chunk length."""
    from ds4jax.cli.options import choose_backend
    from ds4jax.serving.engine.backend import select_backend

    lengths = [n for n in parse_counts("--chunks", chunks) if n <= prompt]
    if not lengths:
        raise ConfigError(f"--chunks {chunks}: all longer than --prompt {prompt}; name a shorter one")
    select_backend(*choose_backend(backend, False, False, None))

    from ds4jax.serving.engine.bench import device_name, measure_prefill
    from ds4jax.serving.engine.programs import Shapes

    subject = _open(model, random, layers, kv_quant, dtype)
    runner = _runner(subject, Shapes(subject.model.spec, 1, prompt, (), tuple(lengths)))
    rows: list[dict[str, Any]] = []
    for chunk in lengths:
        measured = measure_prefill(runner, chunk, prompt, repeats)
        rows.append(
            {
                **origin(device_name()),
                **identity(subject),
                "chunk": chunk,
                "prompt": prompt,
                "repeats": repeats,
                **times(measured.ms),
                "tokens_per_s": measured.tokens_per_s,
                **command_line(),
            }
        )
    print_table(_title(subject, f"prefill of {prompt} tokens"), rows, ("chunk", "ms_median", "ms_p10", "ms_p90", "tokens_per_s"))
    _append(csv, rows)


@app.command()
def load(
    file: Annotated[Path, typer.Argument(help="GGUF file to load.")],
    repeats: Annotated[int, typer.Option(min=1, help="Times to load it. The first may read from the disk, the others from memory.")] = 3,
    backend: BackendOption = "auto",
    csv: CsvOption = None,
) -> None:
    """Measure loading, from the open file to the last weight on the device, and the memory it takes beside the file's map (host gb)."""
    from ds4jax.cli.loading import Numerics, read_spec
    from ds4jax.cli.options import choose_backend
    from ds4jax.serving.engine.backend import select_backend

    select_backend(*choose_backend(backend, False, False, None))

    from ds4jax.cli.bench_model import quant_of
    from ds4jax.model.gguf.reader import GGUFFile
    from ds4jax.serving.engine.bench import device_name, measure_load

    spec = read_spec(file, Numerics())
    size_bytes = sum(tensor.nbytes for tensor in GGUFFile(file).tensors.values())
    rows = []
    for run in range(1, repeats + 1):
        measured = measure_load(GGUFFile(file), spec)
        rows.append(
            {
                **origin(device_name()),
                "model": spec.config.name,
                "quant": quant_of(spec),
                "layers": spec.config.n_layer,
                "run": run,
                "gb": size_bytes / 1e9,
                "seconds": measured.seconds,
                "gb_per_s": size_bytes / 1e9 / measured.seconds,
                "host_gb": None if measured.host_bytes is None else measured.host_bytes / 1e9,
                **command_line(),
            }
        )
    print_table(f"loading {file.name}, {device_name()}", rows, ("run", "gb", "seconds", "gb_per_s", "host_gb"))
    _append(csv, rows)


@app.command()
def context(
    model: ModelOption = None,
    random: RandomOption = None,
    layers: LayersOption = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the step.")] = 1,
    live: LiveOption = None,
    ctx: Annotated[str, typer.Option("-c", "--ctx", help="The two capacities to compare, in tokens.")] = "4096,131072",
    pairs: Annotated[int, typer.Option(min=1, help="Paired measurements; their median ratio counts.")] = 10,
    steps: StepsOption = 20,
    backend: BackendOption = "auto",
    kv_quant: KvQuantOption = "auto",
    dtype: DtypeOption = "auto",
    csv: CsvOption = None,
) -> None:
    """Compare a decode step at the same live context in slots of two capacities, in turns: what does unused capacity cost?"""
    from ds4jax.cli.options import choose_backend
    from ds4jax.serving.engine.backend import select_backend

    capacities = parse_counts("--ctx", ctx)
    if len(capacities) != 2:
        raise ConfigError(f"--ctx {ctx}: expected two capacities, such as 4096,131072")
    select_backend(*choose_backend(backend, False, False, None))

    from ds4jax.serving.engine.bench import DecodeBench, bench_shapes, measure_pairs

    live = live or 2048
    subject = _open(model, random, layers, kv_quant, dtype)
    pretend = subject.random and live >= PRETEND_FROM
    shapes = [bench_shapes(subject.model.spec, (rows,), rows, n, live, steps, pairs, pretend=pretend) for n in capacities]
    small, large = (DecodeBench(_runner(subject, each), rows, live, pretend=pretend) for each in shapes)
    measured = list(measure_pairs(small, large, pairs, steps))
    ratio = median(b.ms_median / a.ms_median for a, b in measured)
    table = [_decode_row(subject, _joined(side)) for side in zip(*measured, strict=True)]
    for row, of_smaller in zip(table, (1.0, ratio), strict=True):
        row["ratio"] = of_smaller
    print_table(
        _title(subject, f"decode, {rows} rows, {live} tokens live"), table, ("ctx", "ms_median", "ms_p10", "ms_p90", "host_ms", "ratio")
    )
    _append(csv, table)


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Read a list such as 1,4,16. Raises ConfigError naming the option."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option}: got {text!r}, expected whole numbers above 0, such as 1,4,16")
    return tuple(sorted({int(part) for part in parts}))


def _open(model: Path | None, random: str | None, layers: int | None, kv_quant: str, dtype: str) -> Subject:
    from ds4jax.cli.bench_model import open_subject
    from ds4jax.cli.loading import Numerics
    from ds4jax.cli.options import choose_model

    path = choose_model(str(model), None, ()).path if model else None
    return open_subject(path, random, layers, Numerics(kv_quant, dtype))


def _runner(subject: Subject, shapes: Shapes) -> MeasuredRunner:
    from ds4jax.cli.console import program_progress
    from ds4jax.cli.loading import describe_plan
    from ds4jax.serving.engine.bench import MeasuredRunner
    from ds4jax.serving.engine.local import program_directory
    from ds4jax.serving.engine.memory import plan_memory, require_fit
    from ds4jax.serving.engine.programs import ProgramStore

    plan = plan_memory(subject.model.spec, shapes.n_slot, shapes.n_ctx, shapes.prefill_shapes)
    note(describe_plan(plan))
    require_fit(plan, subject.model.spec)
    with program_progress() as on_program:
        return MeasuredRunner(subject.model, shapes, ProgramStore(program_directory()), on_program)


def _decode_row(subject: Subject, measured: DecodeTimes) -> dict[str, Any]:
    from ds4jax.serving.engine.bench import device_name

    return {
        **origin(device_name()),
        **identity(subject),
        "bucket": measured.bucket,
        "ctx": measured.n_ctx,
        "live": measured.live,
        "steps": len(measured.ms),
        **times(measured.ms),
        "tokens_per_s": measured.tokens_per_s,
        "host_ms": measured.host_ms_median,
        "occupancy": measured.occupancy,
        **command_line(),
    }


def _joined(parts: tuple[DecodeTimes, ...]) -> DecodeTimes:
    """Put the measurements of one engine together."""
    from dataclasses import replace

    return replace(parts[0], ms=tuple(ms for part in parts for ms in part.ms), host_ms=tuple(ms for part in parts for ms in part.host_ms))


def _title(subject: Subject, what: str) -> str:
    from ds4jax.serving.engine.bench import device_name

    spec = subject.model.spec
    return f"{what}: {spec.config.name}, {subject.quant}, kv {spec.kv_quant}, {spec.dtype}, {device_name()}"


def _append(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        append_csv(path, rows)
        note(f"appended {len(rows)} rows to {path}")
