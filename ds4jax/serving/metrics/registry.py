"""The metrics of one server in a registry of its own, so that several apps in one process do not mix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ds4jax.serving.engine.api import EngineClient
from ds4jax.serving.metrics.engine import EngineCollector
from ds4jax.serving.metrics.vllm import VllmMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DISCONNECTED = "disconnected"
"""How a choice ended whose client left before it did."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """How one choice of a reply went. Times in seconds from submission; None: it never got that far.

    finish: a finish reason of the API, or DISCONNECTED. Of its calls of tools: is_repaired, end tags that the model had left out were
    added; is_retried, the model was asked to write them again; is_unreadable, they could not be read in the end.
    """

    finish: str
    queue_s: float | None
    ttft_s: float | None
    total_s: float
    is_repaired: bool = False
    is_retried: bool = False
    is_unreadable: bool = False


class Metrics:
    """What the edge counts itself, beside the engine's own numbers, which are read at each scrape.

    The same facts are told twice: under our names, by endpoint, and under the names that vLLM has, which routers and dashboards know.
    """

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._choices = self._counter("ds4jax_choices", "Choices of API calls that ended, by how.", "endpoint", "finish")
        self._disconnects = self._counter("ds4jax_disconnects", "API calls whose client left before the end.", "endpoint")
        self._repairs = self._counter("ds4jax_tool_repairs", "Replies whose calls of tools lacked end tags and were read all the same.")
        self._retries = self._counter("ds4jax_tool_retries", "Replies that were begun anew because their calls could not be read.")
        self._unreadable = self._counter("ds4jax_tool_failures", "Replies whose calls of tools could not be read in the end.")
        self._ttft = self._histogram("ds4jax_time_to_first_token_seconds", "From submission to the first token.", "endpoint")
        self._duration = self._histogram("ds4jax_request_seconds", "From submission to the end of the reply.", "endpoint")
        self._vllm = VllmMetrics(self._registry, engine, model_name)
        self._registry.register(EngineCollector(engine))

    def token_followed(self, gap_s: float) -> None:
        """Note the time between two tokens of a choice."""
        self._vllm.token_followed(gap_s)

    def call_ended(self, endpoint: str, choices: Sequence[ChoiceReport]) -> None:
        """Count one API call, which has at least one choice."""
        for choice in choices:
            self._choices.labels(endpoint, choice.finish).inc()
            self._repairs.inc(choice.is_repaired)
            self._retries.inc(choice.is_retried)
            self._unreadable.inc(choice.is_unreadable)
            reason = "abort" if choice.finish == DISCONNECTED else choice.finish
            self._vllm.request_ended(reason, queue_s=choice.queue_s, ttft_s=choice.ttft_s, total_s=choice.total_s)
        if any(choice.finish == DISCONNECTED for choice in choices):
            self._disconnects.labels(endpoint).inc()
        firsts = [choice.ttft_s for choice in choices if choice.ttft_s is not None]
        if firsts:
            self._ttft.labels(endpoint).observe(min(firsts))
        self._duration.labels(endpoint).observe(max(choice.total_s for choice in choices))

    def render(self) -> bytes:
        """Write everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self._registry)

    def _histogram(self, name: str, documentation: str, *labels: str) -> Histogram:
        return Histogram(name, documentation, labels, registry=self._registry, buckets=_SECONDS)
