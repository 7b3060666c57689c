"""`ds4jax bench serve`: what clients see of a server, and what the server counted meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Self

import typer

from ds4jax.cli.bench_counts import Counts, read_counts
from ds4jax.cli.bench_report import append_csv, command_line, origin, percentile, print_table
from ds4jax.cli.console import note, warn
from ds4jax.errors import ConfigError, EngineStoppedError

if TYPE_CHECKING:
    from ds4jax.serving.http.bench_client import Level

_SERVING = re.compile(r"^serving .* at (http://\S+)$", re.MULTILINE)
_START_LIMIT_S, _STOP_LIMIT_S, _POLL_S = 1800.0, 30.0, 0.1
_LOG_TAIL = 1500  # characters of a failed server's log that are shown


def serve(
    url: Annotated[str | None, typer.Option(help="A running server on this machine. Default: start one.")] = None,
    model: Annotated[
        Path | None, typer.Option("-m", "--model", help="GGUF file for the server that is started. Default: the small model.")
    ] = None,
    random: Annotated[
        str | None, typer.Option("--random", help="Random weights for the server that is started: tiny, flash-q2, flash-q4, pro-q2, ...")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Only the first so many layers of --random.")] = None,
    clients: Annotated[str, typer.Option(help="Numbers of clients to measure with, one after another.")] = "1,4,16",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each client, one after another.")] = 3,
    ctx: Annotated[int, typer.Option("-c", "--ctx", min=2, help="Context of the server that is started.")] = 4096,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest a request may take, in seconds.")] = 120.0,
    csv: Annotated[Path | None, typer.Option("--csv", help="Append the results to this file.")] = None,
) -> None:
    """Measure a server with streaming clients: time to the first token, time between tokens, tokens a second in all.

    full_tokens_per_s: the same while every client had an answer under way, so without their starting one after another: what to
    compare with bench decode. rows: sessions that decoded together in a step, on average. compiled: programs compiled while
    clients waited, which should be 0. Clients run in a process of their own and ask for all of max_tokens.
    """
    from ds4jax.cli.bench import parse_counts
    from ds4jax.serving.http.bench_client import Workload, measure

    levels = parse_counts("--clients", clients)
    if url is not None and (model is not None or random is not None):
        raise ConfigError("--model and --random are for a server that is started here; leave them out with --url")
    if random is not None and model is not None:
        raise ConfigError("--model and --random both name weights; give one of them")
    if layers is not None and random is None:
        raise ConfigError("--layers cuts random weights; name them with --random, such as --random flash-q2")
    weights = _weights(model, random, layers)
    with _server(url, weights, max(levels), ctx, compiles_first=random is None) as address:
        workload = Workload(address, prompt, max_tokens, requests, timeout)
        measure(workload, 1, seed=1)  # warm-up: the first request of a process pays for imports and connections
        subject = {**origin(_device_name()), "model": address if url else _name_of(model, random, layers)}
        rows = []
        for n in levels:
            before = read_counts(address)
            level = measure(workload, n)
            rows.append(subject | _seen(level) | _counted(before, read_counts(address)))
    shown = "clients ttft_ms_p50 ttft_ms_p99 gap_ms_p50 gap_ms_p99 tokens_per_s full_tokens_per_s rows compiled".split()
    sizes = {"prompt": prompt, "max_tokens": max_tokens, "ctx": ctx}
    print_table(f"serving, prompts of {prompt} tokens, answers of {max_tokens}: {subject['device']}", rows, shown)
    if csv is not None:
        append_csv(csv, [{**row, **sizes, **command_line()} for row in rows])
        note(f"appended {len(rows)} rows to {csv}")


def _seen(level: Level) -> dict[str, Any]:
    """Sum up what the clients of one level saw, and warn of what failed."""
    for message in sorted(set(level.errors)):
        warn(f"{level.errors.count(message)} of {len(level.outcomes)} requests failed: {message}")
    ttft = [1000 * outcome.ttft_s for outcome in level.outcomes if outcome.ttft_s is not None]
    gaps = [1000 * gap for outcome in level.outcomes for gap in outcome.gaps_s]
    return {
        "clients": level.n_clients,
        "requests": len(level.outcomes),
        "ttft_ms_p50": percentile(ttft, 50),
        "ttft_ms_p99": percentile(ttft, 99),
        "gap_ms_p50": percentile(gaps, 50),
        "gap_ms_p99": percentile(gaps, 99),
        "tokens_per_s": level.tokens_per_s,
        "full_tokens_per_s": level.full_tokens_per_s,
        "errors": len(level.errors),
    }


def _counted(before: Counts | None, after: Counts | None) -> dict[str, Any]:
    """Sum up what the server counted over a level; nothing where it is another kind of server, which has no such numbers."""
    if before is None or after is None:
        return dict.fromkeys(("rows", "steps", "chunks", "compiled"), "")
    over = after - before
    if over.compiled:
        warn(f"{over.compiled:.0f} programs were compiled while clients waited; the numbers of this level hold that too")
    return {
        "rows": over.rows / over.steps if over.steps else float("nan"),
        "steps": int(over.steps),
        "chunks": int(over.chunks),
        "compiled": int(over.compiled),
    }


def _weights(model: Path | None, random: str | None, layers: int | None) -> list[str]:
    """Name the weights as `ds4jax serve` has them named."""
    if random is not None:
        return ["--random", random, *(["--layers", str(layers)] if layers is not None else [])]
    return [] if model is None else ["--model", str(model)]


def _name_of(model: Path | None, random: str | None, layers: int | None) -> str:
    if random is not None:
        return random if layers is None else f"{random}, {layers} layer{'s' * (layers > 1)}"
    return "default" if model is None else model.name


def _device_name() -> str:
    """Name the device that a server on this machine uses. Asked in a process of its own, so that this one takes nothing of the device."""
    code = "from ds4jax.serving.engine.bench import device_name; print(device_name())"
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    return result.stdout.strip() or "unknown"


@contextmanager
def _server(url: str | None, weights: list[str], slots: int, ctx: int, *, compiles_first: bool) -> Iterator[str]:
    """Yield the address of the server that is given, or of one that runs as long as the block.

    compiles_first: the server would serve before it has all its programs, so they are compiled before it starts.

    Raises EngineStoppedError if it does not start.
    """
    if url is not None:
        yield url
        return
    engine = ["--batched-session", str(slots), "--ctx", str(ctx), *weights]
    command = [sys.executable, "-m", "ds4jax.cli", "serve", "--port", "0", *engine]
    with _Ending() as ending, tempfile.TemporaryDirectory(prefix="ds4jax-bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as stderr:
            if compiles_first:  # all buckets must be there: a server that still compiles some would be measured with the others
                with _child([sys.executable, "-m", "ds4jax.cli", "precompile", *engine], stderr, ending) as compiler:
                    compiler.wait()
            with _child(command, stderr, ending) as process:
                address = _wait_for_address(process, log)
                note(f"started a server at {address}: {slots} slots of {ctx} tokens")
                yield address


class _Ending:
    """Make an exception of the signals that end a program at once, so that the block stops what it started.

    While is_held, the exception waits: raised in the midst of starting a process, it would leave that behind.
    """

    def __init__(self) -> None:
        self.is_held = False
        self._number: int | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def release(self) -> None:
        """Let signals through again. Raises SystemExit if one came meanwhile."""
        self.is_held = False
        if self._number is not None:
            raise SystemExit(128 + self._number)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        if not self.is_held:
            raise SystemExit(128 + number)


@contextmanager
def _child(command: list[str], stderr: BinaryIO, ending: _Ending) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command beside the block, at whose end it is stopped."""
    ending.is_held = True
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        ending.release()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Read the server's log until it says where it listens."""
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        text = log.read_text(encoding="utf-8", errors="replace")
        if found := _SERVING.search(text):
            return found[1]
        if ended:
            raise EngineStoppedError(
                f"the server ended with status {process.returncode} before it served; its log ends with:\n{text[-_LOG_TAIL:]}"
            )
        time.sleep(_POLL_S)
    raise EngineStoppedError(
        f"the server did not serve within {_START_LIMIT_S:.0f} s; start one by hand with ds4jax serve, and give its --url"
    )
