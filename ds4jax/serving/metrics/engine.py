"""The engine's numbers under our own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ds4jax.serving.engine.api import EngineClient, EngineStats


class EngineCollector(Collector):
    """Reads EngineStats at each scrape: the engine keeps its counters without knowing of Prometheus."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every family, of one and the same moment."""
        stats = self._engine.stats()
        yield from _gauges(stats)
        yield from _counters(stats)
        yield _batch_sizes(stats)
        padding = {bucket: bucket * n - stats.rows.get(bucket, 0) for bucket, n in stats.steps.items()}
        yield _by_bucket("ds4jax_decode_steps", "Decode launches.", stats.steps)
        yield _by_bucket("ds4jax_decode_rows", "Live rows of decode launches.", stats.rows)
        yield _by_kind("ds4jax_prefix_reuses", "Requests that found the beginning of their prompt, by how.", stats.reuses)
        yield _by_kind("ds4jax_reused_tokens", "Prompt tokens found in the cache, by how.", stats.reused_tokens)
        yield _saves(stats)
        yield _by_bucket("ds4jax_decode_padding_rows", "Rows of decode launches that nobody used.", padding)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("ds4jax_slots", "Resident sessions the server can hold.", stats.n_slots)
    yield GaugeMetricFamily("ds4jax_running", "Requests that hold a slot.", stats.n_running)
    yield GaugeMetricFamily("ds4jax_waiting", "Requests in the queue.", stats.n_waiting)
    yield GaugeMetricFamily("ds4jax_prefilling", "Requests whose prompt is being read.", stats.n_prefilling)
    yield GaugeMetricFamily("ds4jax_kv_tokens", "Tokens that running requests hold in the cache.", stats.kv_tokens)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    yield CounterMetricFamily("ds4jax_prompt_tokens", "Tokens of the prompts that got a slot.", stats.prompt_tokens)
    yield CounterMetricFamily("ds4jax_cached_tokens", "Prompt tokens found in the cache.", stats.cached_tokens)
    yield CounterMetricFamily("ds4jax_snapshots", "Snapshots taken of slots.", stats.snapshots)
    yield CounterMetricFamily("ds4jax_prefill_chunks", "Prefill launches.", stats.prefill_chunks)
    yield CounterMetricFamily("ds4jax_prefill_rows", "Prompts of which prefill launches took a piece.", stats.prefill_rows)
    yield CounterMetricFamily("ds4jax_prefill_tokens", "Prompt tokens computed.", stats.prefill_tokens)
    yield CounterMetricFamily("ds4jax_prefill_padding_tokens", "Tokens of prefill launches that nobody used.", stats.prefill_padding)
    yield CounterMetricFamily("ds4jax_generated_tokens", "Tokens delivered.", stats.generated_tokens)
    yield CounterMetricFamily("ds4jax_failed_steps", "Steps that the device failed.", stats.failed_steps)
    yield CounterMetricFamily("ds4jax_compile_misses", "Programs compiled after warm-up; should stay 0.", stats.compile_misses)
    yield CounterMetricFamily("ds4jax_coalesce_windows", "Coalescing windows that were waited for.", stats.coalesce_windows)
    yield CounterMetricFamily("ds4jax_coalesce_wait_seconds", "Time spent in coalescing windows.", stats.coalesce_wait_us / 1e6)


def _by_kind(name: str, documentation: str, values: Mapping[str, int]) -> Metric:
    """Tell what prompts gained from; every kind is there from the start, so that rates need no first one."""
    family = CounterMetricFamily(name, documentation, labels=("kind",))
    for kind in ("live", "rewind", "fork", "disk"):
        family.add_metric((kind,), values.get(kind, 0))
    return family


def _saves(stats: EngineStats) -> Metric:
    """Tell of sessions written to disk, and of those that were to be."""
    family = CounterMetricFamily("ds4jax_disk_saves", "Sessions saved on disk, by why; failed: not saved.", labels=("reason",))
    for reason in ("cold", "continued", "evict", "shutdown"):
        family.add_metric((reason,), stats.saves.get(reason, 0))
    family.add_metric(("failed",), stats.failed_saves)
    return family


def _batch_sizes(stats: EngineStats) -> Metric:
    """Tell how many sessions decoded together, as a histogram with a bound at every power of two."""
    bounds = [1 << i for i in range(stats.n_slots.bit_length())]
    buckets = [(f"{bound}.0", float(sum(n for size, n in stats.batches.items() if size <= bound))) for bound in bounds]
    buckets.append(("+Inf", float(sum(stats.batches.values()))))
    n_rows = sum(size * n for size, n in stats.batches.items())
    return HistogramMetricFamily("ds4jax_decode_batch_size", "Live rows of a decode launch.", buckets=buckets, sum_value=n_rows)


def _by_bucket(name: str, documentation: str, values: Mapping[int, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=("bucket",))
    for bucket, value in sorted(values.items()):
        family.add_metric((str(bucket),), value)
    return family
