"""Measure an engine on its real path: `EngineCore.step` over the runner, running one step ahead of what is read.

Nothing of the device is simulated; the only thing between core and runner is a stopwatch for the time that the host
spends waiting for tokens. What is left of a step's wall time is the host's own work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from ds4jax.config import EngineConfig
from ds4jax.errors import ConfigError, DecodeFailedError
from ds4jax.model.gguf.load import load_leaves
from ds4jax.model.gguf.reader import GGUFFile
from ds4jax.model.spec import ModelSpec
from ds4jax.serving.engine.api import Finish, FinishReason, GenerateRequest, SamplingParams, Token, TokenLogprobs
from ds4jax.serving.engine.buckets import chunk_buckets, nearest
from ds4jax.serving.engine.core import EngineCore, monotonic_us
from ds4jax.serving.engine.device import Chunk, Row, StepHandle
from ds4jax.serving.engine.programs import Shapes
from ds4jax.serving.engine.runner import DeviceCache, Runner

WARM_STEPS = 8
_LEAD_STEPS = 4  # of every measurement, not counted: the device was idle and the pipeline empty


@dataclass(frozen=True)
class DecodeTimes:
    """Times of the steps of one bucket.

    ms: wall time from one step's tokens to the next's. host_ms: the part of it that the engine's thread did not spend
    waiting for tokens: planning, packing the control array, dispatching the program, delivering events.
    live: tokens in each slot at the first step; occupancy: live rows / bucket rows.
    """

    bucket: int
    n_ctx: int
    live: int
    occupancy: float
    ms: tuple[float, ...]
    host_ms: tuple[float, ...]

    @property
    def ms_median(self) -> float:
        """Median step time."""
        return median(self.ms)

    @property
    def tokens_per_s(self) -> float:
        """Aggregate over the rows, at the median step."""
        return 1000 * self.bucket * self.occupancy / self.ms_median

    @property
    def host_ms_median(self) -> float:
        """Median host time of a step."""
        return median(self.host_ms)


class MeasuredRunner(Runner):
    """A runner that notes how long its results were waited for, and can pretend that slots are full.

    It implements `Device` like any runner: waiting is measured where the engine waits.
    """

    waited_s = 0.0

    def decode(self, rows: Sequence[Row]) -> Any:
        """Enqueue one decode step; see `Device.decode`."""
        return _Watched(self, super().decode(rows))

    def settle(self) -> None:
        """Wait until the device has nothing to do."""
        self._cache = DeviceCache(jax.block_until_ready(self._cache.take("settle")))

    def pretend_live(self, n_tokens: int) -> None:
        """Set the position of every slot, so that steps cost what they cost with so many tokens. Their rows hold whatever they hold."""
        position, *rest = self._cache.take("pretend_live")
        self._cache = DeviceCache((jax.device_put(np.full(position.shape, n_tokens, np.int32), position.sharding), *rest))


class _Watched:
    """A step whose reading is timed."""

    def __init__(self, runner: MeasuredRunner, step: StepHandle) -> None:
        self._runner, self._step = runner, step

    def tokens(self) -> list[int]:
        started = time.perf_counter()
        tokens = self._step.tokens()
        self._runner.waited_s += time.perf_counter() - started
        return tokens

    def logprobs(self, n_top: Sequence[int | None]) -> list[TokenLogprobs | None]:
        return self._step.logprobs(n_top)

    def logits(self) -> Any:
        return self._step.logits()


def bench_shapes(
    spec: ModelSpec, buckets: Sequence[int], n_slot: int, n_ctx: int, live: int, n_steps: int, n_measures: int = 1, *, pretend: bool
) -> Shapes:
    """List the programs that `DecodeBench` needs and no more: these decode buckets, and one prefill chunk for the prompts.

    Args:
        n_steps, n_measures: steps of a measurement, and measurements of one `DecodeBench`.

    Raises ConfigError if a slot has no room for live tokens and the steps.
    """
    chunks = chunk_buckets(n_ctx, EngineConfig.prefill_quantum, EngineConfig.mixed_prefill_quantum)
    chunk = nearest(chunks, 1 if pretend else min(live, chunks[-1]))
    # Rows that are filled first run on, a step for every chunk of the others.
    needed = live + n_measures * (n_steps + _LEAD_STEPS) + 2 * WARM_STEPS + max(buckets) * -(-live // chunk)
    if needed > n_ctx:
        raise ConfigError(
            f"--live {live}: with {n_measures * n_steps} steps a slot needs {needed} tokens, but --ctx is {n_ctx}; change one of them"
        )
    return Shapes(spec, n_slot, n_ctx, tuple(sorted(set(buckets))), (chunk,))


class DecodeBench:
    """Rows that decode for ever, to be measured a few steps at a time.

    Args:
        runner: with a program for the bucket; its slots are cleared.
        bucket: rows, all of them live.
        live: tokens in each slot when measuring begins; where they are fed a few more, since the first rows run on while the last fill.
        pretend: set the positions instead of feeding so many tokens. Only for weights whose answers nobody reads.
    """

    def __init__(self, runner: MeasuredRunner, bucket: int, live: int, *, pretend: bool) -> None:
        self._runner, self._bucket, self._live, self._pretend = runner, bucket, live, pretend
        for slot in range(runner.n_slots):
            runner.clear(slot)
        # One decode step for each chunk of somebody else's prompt, so that the first rows do not run far ahead of the last.
        quantum = runner.prefill_buckets[-1]
        config = EngineConfig(bucket, runner.n_ctx, 0, quantum, quantum, decode_steps_per_prefill=1)
        self._core = EngineCore(runner, config)
        rng = np.random.default_rng(bucket)
        n_prompt = 1 if pretend else live
        for seed in range(bucket):
            prompt = tuple(rng.integers(0, runner.model.config.n_vocab, n_prompt).tolist())
            self._core.submit(GenerateRequest(prompt, None, SamplingParams(seed=seed)))
        self._fill()

    def _fill(self) -> None:
        """Feed all prompts, until every row has given a token."""
        speaking: set[int] = set()
        while len(speaking) < self._bucket:
            speaking |= {event.request_id for event in self._step() if isinstance(event, Token)}
        self._steps(WARM_STEPS)

    def measure(self, n_steps: int) -> DecodeTimes:
        """Measure so many steps. May be called again: rows go on where they were, or at `live` again if that is pretended."""
        if self._pretend:
            self._runner.settle()
            self._runner.pretend_live(self._live)
        self._steps(_LEAD_STEPS - 1)
        before = self._core.stats()
        ms, host_ms = self._steps(n_steps)
        after = self._core.stats()
        n_rows = sum(after.rows.values()) - sum(before.rows.values())
        n_padded = sum(bucket * (n - before.steps.get(bucket, 0)) for bucket, n in after.steps.items())
        self._runner.settle()
        return DecodeTimes(self._bucket, self._runner.n_ctx, self._live, n_rows / n_padded, ms, host_ms)

    def _steps(self, n: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Run n steps after one that sets the clock; return their wall and host times, in ms."""
        marks = []
        for _ in range(n + 1):
            self._step()
            marks.append((time.perf_counter(), self._runner.waited_s))
        wall = [1000 * (b[0] - a[0]) for a, b in pairwise(marks)]
        waited = [1000 * (b[1] - a[1]) for a, b in pairwise(marks)]
        return tuple(wall), tuple(w - v for w, v in zip(wall, waited, strict=True))

    def _step(self) -> tuple[Any, ...]:
        events = self._core.step(monotonic_us()).events
        for event in events:
            if isinstance(event, Finish) and event.reason is FinishReason.ERROR:
                raise DecodeFailedError(event.error or "a session ended while it was measured")
        return events


@dataclass(frozen=True)
class PrefillTimes:
    """Times of one prompt, fed alone in chunks of one length. ms: wall time of each repetition, from the first launch to the last token."""

    chunk: int
    n_prompt: int
    ms: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """At the median."""
        return 1000 * self.n_prompt / median(self.ms)


def measure_prefill(runner: MeasuredRunner, chunk: int, n_prompt: int, repeats: int) -> PrefillTimes:
    """Feed a prompt of random tokens to an empty slot, chunk after chunk, each launched before the one before it is read."""
    tokens = np.random.default_rng(chunk).integers(0, runner.model.config.n_vocab, n_prompt).tolist()
    sampling = SamplingParams(seed=0)
    ms = []
    for _ in range(repeats + 1):
        runner.clear(0)
        runner.settle()
        started, last = time.perf_counter(), None
        for first in range(0, n_prompt, chunk):
            step = runner.prefill([Chunk(0, tokens[first : first + chunk], sampling)])
            if last is not None:
                last.tokens()
            last = step
        assert last is not None
        last.tokens()
        ms.append(1000 * (time.perf_counter() - started))
    return PrefillTimes(chunk, n_prompt, tuple(ms[1:]))


def measure_pairs(a: DecodeBench, b: DecodeBench, n_pairs: int, n_steps: int) -> Iterator[tuple[DecodeTimes, DecodeTimes]]:
    """Measure two engines in turns, the one that begins alternating, so that what drifts on the machine hits both alike."""
    for i in range(n_pairs):
        if i % 2:
            second, first = b.measure(n_steps), a.measure(n_steps)
        else:
            first, second = a.measure(n_steps), b.measure(n_steps)
        yield first, second


@dataclass(frozen=True)
class LoadTimes:
    """Seconds until the last weight is on the device, and the most host memory that loading took beside the map of the file: what the
    started runtime has of its own is not in it, on a CPU the weights are. None where the system does not tell."""

    seconds: float
    host_bytes: int | None


def measure_load(file: GGUFFile, spec: ModelSpec) -> LoadTimes:
    """Load a file's weights and forget them. Raises what `load_leaves` raises."""
    jax.block_until_ready(jax.device_put(0))  # starts the runtime, which on a GPU takes gigabytes of its own
    before, done = anonymous_bytes(), False

    def watch() -> int:
        peak = 0
        while not done:
            peak = max(peak, anonymous_bytes() or 0)
            time.sleep(0.005)
        return peak

    with ThreadPoolExecutor(1, thread_name_prefix="memory") as pool:
        peak = pool.submit(watch)
        started = time.perf_counter()
        try:
            jax.block_until_ready(load_leaves(file, spec).leaves)
            seconds = time.perf_counter() - started
        finally:
            done = True
    return LoadTimes(seconds, None if before is None else max(peak.result() - before, 0))


def anonymous_bytes() -> int | None:
    """Return the memory of this process that is no file's, None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")), None)


def device_name() -> str:
    """Name the device that is measured: a GPU's kind, or the processor's model and its number of cores."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return str(device.device_kind)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "CPU"
    return f"{model}, {os.cpu_count()} cores"
