"""Change logits before a token is drawn: biases, penalties for what was said already, and ends that may not come yet.

What a request asks for is state of its slot, uploaded once when the request begins. A step only reads it, and counts the
token that it draws; so nothing of this is a shape, and a step uploads nothing for it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

IN_PROMPT, IS_END, ONCE = 1, 2, 4  # bits of `seen`: two facts about a token, and the unit in which it is counted
EARLY = -1e30  # logit of an end before its time: never drawn, unless a mask leaves nothing else


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotAdjustments:
    """What each slot's logits go through.

    seen: int32 [S, V], for each token ONCE for each time that it was generated, IN_PROMPT and IS_END.
    bias: f32 [S, V]. number: f32 [3, S]: repetition, frequency and presence penalty.
    since: int32 [2, S]: the position of the first generated token, and the first that a token with IS_END may take.
    A slot whose since[0] is 0 leaves its logits as they are, whatever else stands there.
    """

    seen: jax.Array
    bias: jax.Array
    number: jax.Array
    since: jax.Array


def init_adjustments(n_slot: int, n_vocab: int) -> SlotAdjustments:
    """Return slots that adjust nothing."""
    table = (n_slot, n_vocab)
    return SlotAdjustments(
        jnp.zeros(table, jnp.int32), jnp.zeros(table, jnp.float32), jnp.zeros((3, n_slot), jnp.float32), jnp.zeros((2, n_slot), jnp.int32)
    )


def set_slot(adjustments: SlotAdjustments, one: SlotAdjustments, slot: jax.Array) -> SlotAdjustments:
    """Give slot `slot` what the single slot of `one` has; a slot out of range writes nothing."""
    return SlotAdjustments(
        adjustments.seen.at[slot].set(one.seen[0], mode="drop"),
        adjustments.bias.at[slot].set(one.bias[0], mode="drop"),
        adjustments.number.at[:, slot].set(one.number[:, 0], mode="drop"),
        adjustments.since.at[:, slot].set(one.since[:, 0], mode="drop"),
    )


def asking(adjustments: SlotAdjustments, slot: jax.Array) -> jax.Array:
    """Whether the logits of rows are to be adjusted: bool [B], false for slots out of range."""
    return adjustments.since[0].at[slot].get(mode="fill", fill_value=0) > 0


def adjust(adjustments: SlotAdjustments, logits: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """Adjust logits [B, V] for drawing; rows whose slots ask for nothing keep theirs bit for bit.

    In vLLM's order: bias; repetition penalty (over prompt and generated text: positive logits are divided by it, negative ones
    multiplied); frequency penalty for each time that a token was generated, presence penalty once. Ends before their time become EARLY.

    Args:
        slot: int32 [B], out of range for padding. position: int32 [B], the position that the drawn token will take.
    """
    seen, bias = (table.at[slot].get(mode="clip") for table in (adjustments.seen, adjustments.bias))  # [B, V]
    repetition, frequency, presence = adjustments.number.at[:, slot].get(mode="clip")[..., None]  # [B, 1] each
    count = seen // ONCE
    x = logits + bias
    x = jnp.where(seen & ~IS_END != 0, jnp.where(x > 0.0, x / repetition, x * repetition), x)
    x = x - frequency * count.astype(jnp.float32)
    x = jnp.where(count > 0, x - presence, x)
    is_early = position < adjustments.since[1].at[slot].get(mode="clip")
    x = jnp.where((seen & IS_END != 0) & is_early[:, None], EARLY, x)
    return jnp.where(asking(adjustments, slot)[:, None], x, logits)


def count_drawn(adjustments: SlotAdjustments, slot: jax.Array, position: jax.Array, token: jax.Array) -> SlotAdjustments:
    """Count the tokens [B] that rows have drawn; what is drawn before the end of a prompt is nobody's text."""
    counts = asking(adjustments, slot) & (position >= adjustments.since[0].at[slot].get(mode="clip")) & (token >= 0)
    row = jnp.where(counts, slot, adjustments.seen.shape[0])  # past the last: dropped
    return dataclasses.replace(adjustments, seen=adjustments.seen.at[row, token].add(ONCE, mode="drop"))
