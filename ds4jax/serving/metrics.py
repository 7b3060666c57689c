"""Prometheus metrics of one server: its own registry, so that several apps in one process do not mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ds4jax.serving.engine.api import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """What the edge counts itself, beside the engine's own numbers, which are read at each scrape."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._choices = Counter(
            "ds4jax_choices", "Choices of API calls that ended, by how.", ("endpoint", "finish"), registry=self._registry
        )
        self._ttft = Histogram(
            "ds4jax_time_to_first_token_seconds",
            "From submission to the first token.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._duration = Histogram(
            "ds4jax_request_seconds", "From submission to the end of the reply.", ("endpoint",), buckets=_SECONDS, registry=self._registry
        )
        self._registry.register(_EngineCollector(engine))

    def request_ended(self, endpoint: str, finishes: Sequence[str], *, ttft_s: float | None, total_s: float) -> None:
        """Count one API call; `finishes` has one word a choice."""
        for finish in finishes:
            self._choices.labels(endpoint, finish).inc()
        if ttft_s is not None:
            self._ttft.labels(endpoint).observe(ttft_s)
        self._duration.labels(endpoint).observe(total_s)

    def render(self) -> bytes:
        """Write everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads EngineStats at each scrape: the engine keeps its counters without knowing of Prometheus."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield GaugeMetricFamily("ds4jax_slots", "Resident sessions the server can hold.", stats.n_slots)
        yield GaugeMetricFamily("ds4jax_running", "Requests that hold a slot.", stats.n_running)
        yield GaugeMetricFamily("ds4jax_waiting", "Requests in the queue.", stats.n_waiting)
        yield GaugeMetricFamily("ds4jax_prefilling", "Requests whose prompt is being read.", stats.n_prefilling)
        yield CounterMetricFamily("ds4jax_prefill_chunks", "Prefill launches.", stats.prefill_chunks)
        yield CounterMetricFamily("ds4jax_prefill_tokens", "Prompt tokens computed.", stats.prefill_tokens)
        yield CounterMetricFamily("ds4jax_cached_tokens", "Prompt tokens found in a slot.", stats.cached_tokens)
        yield CounterMetricFamily("ds4jax_generated_tokens", "Tokens delivered.", stats.generated_tokens)
        yield CounterMetricFamily("ds4jax_failed_steps", "Steps that the device failed.", stats.failed_steps)
        yield CounterMetricFamily("ds4jax_compile_misses", "Programs compiled after warm-up; should stay 0.", stats.compile_misses)
        yield CounterMetricFamily("ds4jax_coalesce_wait_seconds", "Time spent in coalescing windows.", stats.coalesce_wait_us / 1e6)
        yield _by_bucket("ds4jax_decode_steps", "Decode launches.", stats.steps)
        yield _by_bucket("ds4jax_decode_rows", "Live rows of decode launches.", stats.rows)


def _by_bucket(name: str, documentation: str, values: dict[int, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=("bucket",))
    for bucket, value in sorted(values.items()):
        family.add_metric((str(bucket),), value)
    return family
