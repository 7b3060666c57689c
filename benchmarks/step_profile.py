"""Measure where the time of a decode step goes: experts, dense products, attention, ..., and gaps in which nothing runs.

    python -m benchmarks.step_profile [--model FILE.gguf | --random flash-q2 [--layers N]] [--buckets 1,4,16] [--live 2048] [--csv FILE]

Runs the engine's own decode program of each bucket, every row live, one step enqueued ahead of what is read, first by the clock
and then under JAX's profiler, and gives every moment between the first operation and the last to the part of the model that ran.
ms is of a step in the profile, launches are operations a step, clock_ms is a step without the profiler. On a CPU operations of several
threads share their time, and its profiler slows small operations down.
Contexts are not fed: positions are set, so the weights may be of any kind, but answers mean nothing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.trace import Spent, read_events, read_sources, split_time
from ds4jax.cli.bench import parse_counts
from ds4jax.cli.bench_model import Subject, open_subject
from ds4jax.cli.bench_report import append_csv, identity, origin, print_table
from ds4jax.cli.console import note
from ds4jax.cli.loading import Numerics
from ds4jax.errors import ConfigError, DecodeFailedError
from ds4jax.packaged import small_model
from ds4jax.serving.engine.api import SamplingParams
from ds4jax.serving.engine.bench import MeasuredRunner, device_name
from ds4jax.serving.engine.device import Row
from ds4jax.serving.engine.local import program_directory
from ds4jax.serving.engine.programs import ProgramStore, Shapes

WARM_STEPS = 5


class Stepper:
    """Decode steps of one bucket, all rows live with `live` tokens when a run begins."""

    def __init__(self, runner: MeasuredRunner, bucket: int, live: int) -> None:
        self.runner, self.bucket, self.live = runner, bucket, live
        tokens = np.random.default_rng(bucket).integers(0, runner.n_vocab, bucket).tolist()
        self._first = [Row(slot, token, SamplingParams(seed=slot)) for slot, token in enumerate(tokens)]
        self._rows = [replace(row, token=None) for row in self._first]

    def run(self, n_steps: int) -> float:
        """Run so many steps and wait for the last; ms a step. Raises DecodeFailedError where they give no tokens."""
        self.runner.pretend_live(self.live)
        self.runner.settle()
        started = time.perf_counter()
        last = self.runner.decode(self._first)
        for _ in range(n_steps - 1):
            step = self.runner.decode(self._rows)
            last.tokens()
            last = step
        if min(last.tokens()) < 0:  # rows without tokens would all go to the same experts, which is faster
            raise DecodeFailedError("logits that are not numbers, or all equal")
        return 1000 * (time.perf_counter() - started) / n_steps

    def profile(self, n_steps: int) -> dict[str, Spent]:
        """Run so many steps under the profiler: what each part took of one of them."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the host down
        with tempfile.TemporaryDirectory(prefix="ds4jax-profile-") as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                self.run(n_steps)
            events = read_events(Path(folder))
        sources = read_sources(self.runner.programs["decode", self.bucket].executable.as_text() or "")
        if not sources:
            note("this program does not say where its operations come from: all but kernels count as other")
        return {part: Spent(s.ms / n_steps, s.launches / n_steps) for part, s in split_time(events, sources).items()}


def measure(subject: Subject, buckets: Sequence[int], n_ctx: int, live: int, n_steps: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each bucket in turn, one a part."""
    shapes = Shapes(subject.model.spec, max(buckets), n_ctx, tuple(buckets), ())
    runner = MeasuredRunner(subject.model, shapes, ProgramStore(program_directory()))
    for bucket in buckets:
        stepper = Stepper(runner, bucket, live)
        stepper.run(WARM_STEPS)
        clock_ms = stepper.run(n_steps)
        about = {"bucket": bucket, "ctx": n_ctx, "live": live, "steps": n_steps, "clock_ms": clock_ms}
        yield [about | row for row in shares(stepper.profile(n_steps))]


def shares(spent: Mapping[str, Spent]) -> list[dict[str, Any]]:
    """Put the parts down with their share of the step."""
    total_ms = sum(part.ms for part in spent.values())
    return [{"part": name, "ms": s.ms, "share": s.ms / total_ms if total_ms else 0.0, "launches": s.launches} for name, s in spent.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and append to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="default: the small model of the package")
    parser.add_argument("--random", default=None, help="random weights instead: tiny-q8, flash-q2, ...")
    parser.add_argument("--layers", type=int, default=None, help="only the first so many of --random")
    parser.add_argument("--buckets", default="1,4,16", help="rows of a step, such as 1,16,64")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens a slot holds")
    parser.add_argument("--live", type=int, default=2048, help="tokens in every slot when steps begin")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--csv", type=Path, default=None)
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    if options.live + options.steps > options.ctx:
        parser.error(f"--live {options.live}: with {options.steps} steps that is more than --ctx {options.ctx}")
    try:
        buckets = parse_counts("--buckets", options.buckets)
        subject = open_subject(options.model or (None if options.random else small_model()), options.random, options.layers, Numerics())
    except ConfigError as error:
        parser.error(str(error))
    device = device_name()
    for rows in measure(subject, buckets, options.ctx, options.live, options.steps):
        title = f"a step of {rows[0]['bucket']} rows, {options.live} tokens live: {subject.model.config.name}, {device}"
        print_table(f"{title}; {rows[0]['clock_ms']:.4g} ms by the clock", rows, ("part", "ms", "share", "launches"))
        if options.csv is not None:
            command = {"command": shlex.join(["python", "-m", "benchmarks.step_profile", *arguments])}
            append_csv(options.csv, [origin(device) | identity(subject) | row | command for row in rows])


if __name__ == "__main__":
    main()
