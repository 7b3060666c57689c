"""What an engine counts for its operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds4jax.serving.engine.api import EngineStats
from ds4jax.serving.engine.buckets import PrefillShape
from ds4jax.serving.engine.device import Device
from ds4jax.serving.engine.session import Session, State


@dataclass(slots=True)
class Counters:
    """Totals since start, by bucket or finish reason where that is what one asks for."""

    steps: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    reuses: Counter[str] = field(default_factory=Counter)
    reused_tokens: Counter[str] = field(default_factory=Counter)
    saves: Counter[str] = field(default_factory=Counter)
    failed_saves: int = 0
    prefill_chunks: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_padding: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    snapshots: int = 0
    generated_tokens: int = 0
    failed_steps: int = 0
    coalesce_wait_us: int = 0
    coalesce_windows: int = 0

    def decoded(self, n_rows: int, bucket: int) -> None:
        """Count a decode launch."""
        self.steps[bucket] += 1
        self.rows[bucket] += n_rows
        self.batches[n_rows] += 1

    def prefilled(self, lengths: Sequence[int], shape: PrefillShape) -> None:
        """Count a prefill launch of pieces of these lengths."""
        self.prefill_chunks += 1
        self.prefill_rows += len(lengths)
        self.prefill_tokens += sum(lengths)
        self.prefill_padding += shape.n_rows * shape.n_tokens - sum(lengths)

    def admitted(self, n_prompt: int, n_cached: int, reuse: str | None) -> None:
        """Count a request that got a slot; reuse: what it gained from (`slots.Choice.reuse`, or disk)."""
        self.prompt_tokens += n_prompt
        self.cached_tokens += n_cached
        if reuse is not None:
            self.reuses[reuse] += 1
            self.reused_tokens[reuse] += n_cached

    def waited(self, wait_us: int) -> None:
        """Count a coalescing window."""
        self.coalesce_windows += 1
        self.coalesce_wait_us += wait_us

    def snapshot(self, device: Device, residents: Sequence[Session], n_waiting: int) -> EngineStats:
        """Freeze the totals together with the gauges of this moment; other threads may keep the result."""
        return EngineStats(
            n_slots=device.n_slots,
            n_ctx=device.n_ctx,
            n_running=sum(not s.finished for s in residents),
            n_waiting=n_waiting,
            n_prefilling=sum(s.state is State.PREFILLING for s in residents),
            steps=dict(self.steps),
            rows=dict(self.rows),
            prefill_chunks=self.prefill_chunks,
            prefill_rows=self.prefill_rows,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            finished=dict(self.finished),
            failed_steps=self.failed_steps,
            compile_misses=device.compile_misses,
            coalesce_wait_us=self.coalesce_wait_us,
            batches=dict(self.batches),
            prompt_tokens=self.prompt_tokens,
            prefill_padding=self.prefill_padding,
            coalesce_windows=self.coalesce_windows,
            reuses=dict(self.reuses),
            reused_tokens=dict(self.reused_tokens),
            saves=dict(self.saves),
            failed_saves=self.failed_saves,
            snapshots=self.snapshots,
            kv_tokens=sum(s.n_fed for s in residents if not s.finished),
        )
