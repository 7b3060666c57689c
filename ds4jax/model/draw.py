"""What a step does with its logits: adjust and mask them, draw each row's token, count it, and score it for those who want to know.

Rows that ask for nothing pay nothing: on a CPU nothing of it runs unless some row asks, on a GPU it is a few µs of a step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ds4jax.model.adjust import SlotAdjustments, adjust, asking, count_drawn
from ds4jax.model.mask import RowMask, mask_logits
from ds4jax.model.sampling import RowSampling, sample
from ds4jax.model.scores import TOP, score


def draw(
    logits: jax.Array, sampling: RowSampling, adjustments: SlotAdjustments, mask: RowMask, slot: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, SlotAdjustments]:
    """Draw the next token of each row.

    Args:
        logits: [B, V] f32. slot: int32 [B], out of range for padding. position: int32 [B], the position that the drawn token will take.

    Returns:
        Tokens as `sample` gives them, scores as `score` does, and the adjustments with the tokens counted.
    """

    def drawn() -> tuple[jax.Array, jax.Array]:
        adjusted = mask_logits(adjust(adjustments, logits, slot, position), mask, slot)
        token = sample(logits, sampling, position, adjusted)
        return token, score(logits, token, sampling.wants_scores)

    def drawn_plainly() -> tuple[jax.Array, jax.Array]:
        return sample(logits, sampling, position), jnp.zeros((len(slot), 1 + 2 * TOP), jnp.int32)

    if jax.default_backend() == "gpu":  # which must not ask the host whether anybody asks
        token, scores = drawn()
    else:
        is_asked = jnp.any(asking(adjustments, slot) | mask.asking | sampling.wants_scores)
        token, scores = jax.lax.cond(is_asked, drawn, drawn_plainly)
    return token, scores, count_drawn(adjustments, slot, position, token)
