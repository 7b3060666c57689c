"""How much the model thinks before it answers."""

from __future__ import annotations

from enum import IntEnum


class Thinking(IntEnum):
    """A mode of thinking; true unless it is OFF. MAX thinks as HIGH does, after a prompt that begins with MAX_EFFORT."""

    OFF = 0
    HIGH = 1
    MAX = 2

    def within(self, n_ctx: int) -> Thinking:
        """Lower MAX to HIGH where a slot of n_ctx tokens is too small for thoughts of that length."""
        return Thinking.HIGH if self is Thinking.MAX and n_ctx < LEAST_MAX_CTX else self


LEAST_MAX_CTX = 384 << 10
"""Tokens that a slot must hold for MAX, as in ds4."""

# DeepSeek's own words, to the byte: the model was trained to think longer after them, and not after others.
MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously "
    "stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected "
    "hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
