"""What a server counts, read from its `/metrics` before and after a measurement."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from urllib.error import URLError
from urllib.request import urlopen

_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Counts:
    """Counters since the server's start.

    steps: decode launches; rows: sessions in them; chunks: prefill launches; compiled: programs compiled after warm-up.
    """

    steps: float
    rows: float
    chunks: float
    compiled: float

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(after - earlier for after, earlier in zip(astuple(self), astuple(before), strict=True)))


_SERIES = {
    "steps": "ds4jax_decode_steps_total",
    "rows": "ds4jax_decode_rows_total",
    "chunks": "ds4jax_prefill_chunks_total",
    "compiled": "ds4jax_compile_misses_total",
}


def read_counts(url: str) -> Counts | None:
    """Read the counters of the server at url; None if it tells none of ours."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urlopen(f"{url.rstrip('/')}/metrics", timeout=_TIMEOUT_S) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
    except (URLError, OSError, ValueError):
        return None
    samples = [sample for family in families for sample in family.samples]
    if not any(sample.name == _SERIES["compiled"] for sample in samples):
        return None
    return Counts(*(sum(s.value for s in samples if s.name == _SERIES[field.name]) for field in fields(Counts)))
