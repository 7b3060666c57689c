"""Prometheus metrics of one server."""

from ds4jax.serving.metrics.registry import CONTENT_TYPE, DISCONNECTED, ChoiceReport, Metrics

__all__ = ["CONTENT_TYPE", "DISCONNECTED", "ChoiceReport", "Metrics"]
