"""The engine's log lines. Operators grep for them, so their wording is fixed."""

from __future__ import annotations

import logging

logger = logging.getLogger("ds4jax.engine")


def log_batch(count: int, bucket: int, elapsed_us: int, *, ok: bool) -> None:
    """Report one decode step: live rows, padded rows, and microseconds from its launch until its tokens were read."""
    status = "ok" if ok else "error"
    logger.info("decode batch count=%d bucket=%d elapsed=%.3f ms status=%s", count, bucket, elapsed_us / 1000, status)
