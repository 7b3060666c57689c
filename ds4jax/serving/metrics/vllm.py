"""The series that routers, autoscalers and dashboards scrape from vLLM, under its names and with its labels and buckets.

Only what means the same here is told. Where vLLM has renamed a series, the old name is told too: scrapers outlive servers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ds4jax.serving.engine.api import EngineClient

_LABELS = ("model_name", "engine")
_ENGINE = "0"  # one engine a process

# The bounds are vLLM's own: quantiles over servers of both kinds need the same ones.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

# Our finish reasons that vLLM words differently: to it, calls of tools are an ordinary stop.
_REASONS = {"tool_calls": "stop"}


class VllmMetrics:
    """One server's requests as vLLM counts them: every choice of a reply is one."""

    def __init__(self, registry: CollectorRegistry, engine: EngineClient, model_name: str) -> None:
        self._registry, self._labels = registry, (model_name, _ENGINE)
        self._success = Counter(
            "vllm:request_success", "Requests that ended, by how.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error"):  # known from the start, so that rates need no first one
            self._success.labels(*self._labels, reason)
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "From submission to the first token.", _FIRST_TOKEN_S)
        self._gaps = _Gaps(self._labels)
        self._total = self._histogram("vllm:e2e_request_latency_seconds", "From submission to the end of a request.", _REQUEST_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time a request waited for a slot.", _REQUEST_S)
        registry.register(self._gaps)
        registry.register(_VllmCollector(engine, self._labels))

    def token_followed(self, gap_s: float) -> None:
        """Note the time between two tokens of a request."""
        self._gaps.add(gap_s)

    def request_ended(self, reason: str, *, queue_s: float | None, ttft_s: float | None, total_s: float) -> None:
        """Count one request; times are from its submission, None where it never got that far."""
        self._success.labels(*self._labels, _REASONS.get(reason, reason)).inc()
        if queue_s is not None:
            self._queue.observe(queue_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        self._total.observe(total_s)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, _LABELS, buckets=buckets, registry=self._registry).labels(*self._labels)


class _Gaps(Collector):
    """Times between tokens, under both of their names. Every token counts here, so it is one addition; the rest is done at a scrape."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._counts = [0] * (len(_TOKEN_S) + 1)
        self._sum_s = 0.0

    def add(self, gap_s: float) -> None:
        self._counts[bisect_left(_TOKEN_S, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, map(float, _TOKEN_S)), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        for name, documentation in (
            ("vllm:inter_token_latency_seconds", "Between two tokens of a request."),
            ("vllm:time_per_output_token_seconds", "The older name of vllm:inter_token_latency_seconds."),
        ):
            family = HistogramMetricFamily(name, documentation, labels=_LABELS)
            family.add_metric(self._labels, buckets, self._sum_s)
            yield family


class _VllmCollector(Collector):
    """What the engine knows itself, read at each scrape."""

    def __init__(self, engine: EngineClient, labels: tuple[str, ...]) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        usage = stats.kv_tokens / (stats.n_slots * stats.n_ctx)
        yield self._gauge("vllm:num_requests_running", "Requests that hold a slot.", stats.n_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.n_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the cache that running requests fill; 1 means all of it.", usage)
        yield self._gauge("vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.", usage)
        yield self._counter("vllm:prompt_tokens", "Tokens of the prompts that got a slot.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens delivered.", stats.generated_tokens)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens that were looked for in the cache.", stats.prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens that were found in the cache.", stats.cached_tokens)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(name, documentation, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family
