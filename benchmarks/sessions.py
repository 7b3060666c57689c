"""Measure what sessions gain that need not be computed again, and what it costs the others to save one.

    python benchmarks/sessions.py [--model FILE.gguf | --random flash-q2 [--layers N]] [--tokens 12288] [--repeats 8] [--csv FILE]

Through the public engine, greedy, with the small default model if none is named:

- second_turn: time to the first token of a conversation's second turn, against that of the same prompt in an engine without it.
- shared: tokens computed for eight sessions that come at once with one system prompt, against one of them alone.
- restart: time to the first token of a conversation whose engine was closed, from disk, against that of a new prompt.
- saving: time between two tokens of seven sessions while a long one that loses its slot is being saved, against before and after (steps
  grow longer as their contexts do).
"""

from __future__ import annotations

import argparse
import queue
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ds4jax import Engine, Model
from ds4jax.cli.bench_report import append_csv, origin, print_table
from ds4jax.cli.loading import Numerics, open_model
from ds4jax.config import EngineConfig, KVPolicy
from ds4jax.serving.engine.api import Event, Finish, GenerateRequest, SamplingParams, Started, Token
from ds4jax.serving.engine.bench import device_name

SLOTS = 8
OWN = 64  # tokens of a turn
ANSWER = 32
EVICT_ALONE = KVPolicy(cold_max_tokens=0, continued_interval_tokens=0, space_mb=1 << 20)


@dataclass
class Asked:
    """A request under way: when it was submitted, and when its events came, in seconds."""

    prompt: list[int]
    submitted: float = 0.0
    started: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    n_cached: int = 0
    done: queue.SimpleQueue[Finish] = field(default_factory=queue.SimpleQueue)
    id: int = 0

    def __call__(self, event: Event) -> None:
        """Take an event on the engine's thread."""
        now = time.perf_counter()
        match event:
            case Started():
                self.started, self.n_cached = now, event.n_cached
            case Token():
                self.tokens.append(event.token)
                self.times.append(now)
            case Finish():
                self.done.put(event)

    @property
    def ttft_ms(self) -> float:
        """Time to the first token."""
        return 1000 * (self.times[0] - self.submitted)

    def wait(self) -> Asked:
        """Wait for the end."""
        finish = self.done.get(timeout=600)
        assert finish.error is None, finish.error
        return self


def ask(engine: Engine, prompt: Sequence[int], n: int = ANSWER) -> Asked:
    """Submit a prompt."""
    asked = Asked(list(prompt), time.perf_counter())
    asked.id = engine.submit(GenerateRequest(tuple(prompt), n, SamplingParams(temperature=0.0, seed=0)), asked)
    return asked


class Bench:
    """One model, engines over it, and prompts that no engine has seen."""

    def __init__(self, model: Model, n_tokens: int, folder: Path, n_repeat: int) -> None:
        self.model, self.n_tokens, self.folder, self.n_repeat = model, n_tokens, folder, n_repeat
        self._rng = np.random.default_rng(0)

    @contextmanager
    def engine(self, name: str, policy: KVPolicy | None = None) -> Iterator[Engine]:
        """Open an engine with a folder of this name."""
        config = EngineConfig(slots=SLOTS, ctx=self.n_tokens + 4096)
        with Engine(self.model, config=config, kv_disk=self.folder / name, kv_policy=policy) as engine:
            ask(engine, self.prompt(200)).wait()  # the first request of a process pays for imports
            yield engine

    def prompt(self, n: int) -> list[int]:
        """Make a new prompt."""
        return [int(token) for token in self._rng.integers(8, self.model.config.n_vocab, n)]

    def second_turn(self) -> dict[str, Any]:
        """Go on with a conversation in its slot, where the answer is part of the next prompt."""
        with self.engine("second") as engine:
            first = ask(engine, self.prompt(self.n_tokens)).wait()
            second = ask(engine, [*first.prompt, *first.tokens, *self.prompt(OWN)]).wait()
            cold = ask(engine, self.prompt(len(second.prompt))).wait()
        return result("second_turn", len(second.prompt), cold.ttft_ms, second.ttft_ms, "ms", second.n_cached)

    def shared(self) -> dict[str, Any]:
        """Compute a system prompt once for all that come with it."""
        system = self.prompt(self.n_tokens // 2)
        with self.engine("shared") as engine:
            before = engine.stats().prefill_tokens
            asked = [ask(engine, [*system, *self.prompt(OWN)]) for _ in range(SLOTS)]
            n_cached = sum(one.wait().n_cached for one in asked)
            n_computed = engine.stats().prefill_tokens - before
        return result("shared", len(system) + OWN, len(system) + OWN, n_computed, "tokens", n_cached)

    def restart(self) -> dict[str, Any]:
        """Go on with a conversation in another engine, from disk."""
        with self.engine("restart") as engine:
            first = ask(engine, self.prompt(self.n_tokens)).wait()
        with self.engine("restart") as engine:
            second = ask(engine, [*first.prompt, *first.tokens, *self.prompt(OWN)]).wait()
            cold = ask(engine, self.prompt(len(second.prompt))).wait()
            assert engine.stats().reuses == {"disk": 1}
        return result("restart", len(second.prompt), cold.ttft_ms, second.ttft_ms, "ms", second.n_cached)

    def saving(self) -> dict[str, Any]:
        """Let a session lose its slot while all others decode."""
        alone: list[float] = []
        beside: list[float] = []
        with self.engine("saving", EVICT_ALONE) as engine:
            for repeat in range(self.n_repeat):
                ask(engine, self.prompt(self.n_tokens)).wait()
                decoders = [ask(engine, self.prompt(OWN), n=2000) for _ in range(SLOTS - 1)]
                wait_until(lambda all=decoders: min(len(one.times) for one in all) >= 150)
                newcomer = ask(engine, self.prompt(OWN)).wait()
                wait_until(lambda n=repeat: engine.stats().saves.get("evict", 0) > n)
                saved_at = time.perf_counter()
                wait_until(lambda one=decoders[-1], since=saved_at: len(gaps_ms(one, since, time.perf_counter())) >= 100)
                for one in decoders:
                    engine.cancel(one.id)
                    one.wait()
                before = gaps_ms(decoders[-1], newcomer.submitted - 100 * median_gap_s(decoders[-1]), newcomer.submitted)
                alone += before[-100:] + gaps_ms(decoders[-1], saved_at, time.perf_counter())[:100]
                beside += gaps_ms(decoders[-1], newcomer.submitted, newcomer.started)
        return result("saving", self.n_tokens, median(alone), median(beside), "ms", len(beside))


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads bring about. Raises TimeoutError where it does not come, as when a session ends too soon."""
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("sessions: waited ten minutes for the others to decode, or for a save to end")
        time.sleep(0.01)


def median_gap_s(asked: Asked) -> float:
    """Return the time between two tokens."""
    return float(np.median(np.diff(asked.times)))


def gaps_ms(asked: Asked, since: float, until: float) -> list[float]:
    """List the times between tokens that came within a stretch of time."""
    times = [t for t in asked.times if since <= t <= until]
    return [1000 * float(gap) for gap in np.diff(times)]


def result(what: str, n_tokens: int, before: float, after: float, unit: str, n: int) -> dict[str, Any]:
    """Put one measurement down. n: tokens that were found, or gaps that were measured."""
    return {"what": what, "tokens": n_tokens, "without": before, "with": after, "unit": unit, "ratio": after / before, "n": n}


def main() -> None:
    """Measure, print, and append to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--random", default=None, help="weights, as for ds4jax bench")
    parser.add_argument("--layers", type=int, default=None, help="only the first so many of --random")
    parser.add_argument("--tokens", type=int, default=12288, help="of the long conversation")
    parser.add_argument("--repeats", type=int, default=8, help="of saving")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--only", choices=("second_turn", "shared", "restart", "saving"), action="append")
    options = parser.parse_args()
    model = open_model(options.model, options.random, options.layers, Numerics())
    model.digest = model.digest or "random"  # else nothing of it would be kept; the folder goes with this process
    spec = model.spec
    subject = {**origin(device_name()), "model": spec.config.name, "kv_quant": spec.kv_quant, "dtype": spec.dtype, "slots": SLOTS}
    with tempfile.TemporaryDirectory(prefix="ds4jax-sessions-") as folder:
        bench = Bench(model, options.tokens, Path(folder), options.repeats)
        rows = [getattr(bench, what)() for what in options.only or ("second_turn", "shared", "restart", "saving")]
    print_table(f"sessions: {subject['device']}", rows, list(rows[0]))
    if options.csv is not None:
        command = {"command": shlex.join(["python", *sys.argv])}
        append_csv(options.csv, [subject | row | command for row in rows])


if __name__ == "__main__":
    main()
